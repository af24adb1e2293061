BEGIN TRANSACTION;
CREATE TABLE applied (
    slot    INTEGER PRIMARY KEY,
    request INTEGER NOT NULL
);
CREATE TABLE dentry (
    id     INTEGER PRIMARY KEY, -- survives renames; effects and objects refer to it
    parent INTEGER NOT NULL,        -- inode of the directory
    name   BLOB NOT NULL,
    ino    INTEGER NOT NULL,
    UNIQUE (parent, name)
);
INSERT INTO "dentry" VALUES(1,1,X'72756E73',2);
INSERT INTO "dentry" VALUES(2,1,X'64697274792E62696E',3);
INSERT INTO "dentry" VALUES(3,1,X'736166652E62696E',4);
INSERT INTO "dentry" VALUES(4,2,X'73656E742E62696E',5);
INSERT INTO "dentry" VALUES(5,1,X'6C696E6B',6);
CREATE TABLE effect (
    id        INTEGER PRIMARY KEY,
    kind      TEXT NOT NULL,        -- publish | relocate | unpublish
    dentry    INTEGER,              -- publish, relocate: which name; unpublish: the name whose rename
                                    -- left this key behind, NULL when the name itself is gone
    gen       INTEGER,              -- publish: which generation; NULL: attributes, symlink, directory
    key       TEXT,                 -- unpublish: which key
    class     TEXT NOT NULL,        -- data | small | barrier
    since     INTEGER NOT NULL,     -- smallest end number among the effects it superseded
    "end"     INTEGER NOT NULL,     -- when it was complete
    state     TEXT NOT NULL,        -- pending | blocked | conflicted
    error     TEXT,
    queued_ns INTEGER NOT NULL,     -- last seal; settle counts from here. 0: a person wants it in the store
    first_ns  INTEGER NOT NULL      -- first seal of this run of rewrites; settle_max counts from here
);
INSERT INTO "effect" VALUES(1,'publish',2,1,NULL,'data',1,1,'pending',NULL,1796009720315290973,1796009720315290973);
INSERT INTO "effect" VALUES(2,'publish',4,3,NULL,'data',3,3,'pending',NULL,1796009720315988436,1796009720315988436);
CREATE TABLE generation (
    gen        INTEGER PRIMARY KEY, -- never reused
    ino        INTEGER NOT NULL,
    device     INTEGER NOT NULL,    -- index of the cache device that holds the cache file
    file       INTEGER NOT NULL,    -- the cache file's number there; an edited durable generation
                                    -- hands its file on to the next one
    state      TEXT NOT NULL,       -- model.states.GenState
    lane       TEXT NOT NULL,       -- tracked | passthrough: how it was written
    size       INTEGER NOT NULL,    -- bytes, valid once sealed
    dirty      BLOB,                -- extents that differ from the base; NULL: unknown
    base       INTEGER,             -- generation that `dirty` is relative to (its bytes may be found
                                    -- in the object whose `gen` it is); NULL: none, all is dirty
    present    BLOB,                -- extents that the cache file holds; NULL: all of them
    crc64      INTEGER,             -- CRC64NVME of the whole content, once known (two's complement)
    created_ns INTEGER NOT NULL,
    sealed_ns  INTEGER,
    used_ns    INTEGER NOT NULL,    -- last use, for eviction
    synced     INTEGER NOT NULL DEFAULT 0, -- 1: sealed and fsynced, so its bytes survive a power cut
    grows      INTEGER NOT NULL DEFAULT 0, -- 1: the first `size` bytes of a file that is still being
                                    -- written (a log); the cache file is the open generation's
    pinned     INTEGER NOT NULL DEFAULT 0, -- 1: `cachefs pin`, never evicted
    error      TEXT                 -- why it is stalled, held or conflicted; NULL otherwise
);
INSERT INTO "generation" VALUES(1,3,0,1,'sealed','tracked',55000,NULL,NULL,NULL,NULL,1796009720315290973,1796009720315290973,1796009720315290973,1,0,0,NULL);
INSERT INTO "generation" VALUES(2,4,0,2,'durable','tracked',52000,NULL,NULL,NULL,5617601490997771527,1796009720315709232,1796009720315709232,1796009720315709232,1,0,0,NULL);
INSERT INTO "generation" VALUES(3,5,0,3,'sealed','tracked',16384,NULL,NULL,NULL,NULL,1796009720315988436,1796009720315988436,1796009720315988436,1,0,0,NULL);
CREATE TABLE inode (
    ino         INTEGER PRIMARY KEY, -- never reused, the kernel may remember it
    mode        INTEGER NOT NULL,   -- st_mode with the type bits
    uid         INTEGER NOT NULL,
    gid         INTEGER NOT NULL,
    nlink       INTEGER NOT NULL,   -- dentries that name it; for a directory 2 + subdirectories
    size        INTEGER NOT NULL,   -- bytes; while a generation is open its cache file knows better
    atime_ns    INTEGER NOT NULL,
    mtime_ns    INTEGER NOT NULL,
    ctime_ns    INTEGER NOT NULL,
    target      BLOB,               -- symlinks: where to; NULL for everything else
    blocks      INTEGER NOT NULL DEFAULT 0, -- st_blocks: 512-byte units that hold data
    gen         INTEGER,            -- files: current generation; NULL: content is the object's
    listed_ns   INTEGER,            -- directories: when the bucket was last listed here; 0: made here,
                                    -- so complete by construction; NULL: never listed
    attrs_known INTEGER NOT NULL DEFAULT 1 -- 0: from a listing, the object's metadata not yet read
);
INSERT INTO "inode" VALUES(1,16877,0,0,3,4096,1796009720314474494,1796009720314763934,1796009720314763934,NULL,0,NULL,0,1);
INSERT INTO "inode" VALUES(2,16877,0,0,2,4096,1796009720314673026,1796009720314673026,1796009720314673026,NULL,0,NULL,0,1);
INSERT INTO "inode" VALUES(3,33188,0,0,1,55000,1796009720315257716,1796009720315257716,1796009720315257716,NULL,0,1,NULL,1);
INSERT INTO "inode" VALUES(4,33188,0,0,1,52000,1796009720315693357,1796009720315693357,1796009720315693357,NULL,0,2,NULL,1);
INSERT INTO "inode" VALUES(5,33188,0,0,1,16384,1796009720315971712,1796009720315971712,1796009720315971712,NULL,0,3,NULL,1);
INSERT INTO "inode" VALUES(6,41471,0,0,1,9,1796009720316208085,1796009720316208085,1796009720316208085,X'64697274792E62696E',0,NULL,NULL,1);
CREATE TABLE object (
    key      TEXT PRIMARY KEY,
    dentry   INTEGER,               -- whose content it shows; NULL: that name is gone, to be deleted
    etag     TEXT NOT NULL,
    size     INTEGER NOT NULL,
    crc64    INTEGER,               -- full-object CRC64NVME, when this node uploaded it
    gen      INTEGER,               -- generation whose bytes it holds; NULL: another writer's
    stale    INTEGER NOT NULL DEFAULT 0, -- 1: not the entry's content, only a key that its next
                                    -- publish overwrites (it was renamed over this name)
    parts    TEXT,                  -- JSON [[size, crc64], ...] of the last upload, for comparing
    meta     TEXT,                  -- JSON of the object's user metadata as last written or read
    mtime_ns INTEGER NOT NULL,      -- LastModified
    intents  TEXT                   -- JSON [[size, user metadata], ...] of what was sent to this key
                                    -- without an answer: if the key holds one of these, it is ours
) WITHOUT ROWID;
INSERT INTO "object" VALUES('safe.bin',3,'etag',52000,5617601490997771527,2,0,NULL,NULL,1796009720315709232,NULL);
CREATE TABLE setting (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO "setting" VALUES('next_dentry','4097');
INSERT INTO "setting" VALUES('next_generation','4097');
INSERT INTO "setting" VALUES('next_inode','4098');
INSERT INTO "setting" VALUES('schema_version','1');
CREATE TABLE upload (
    id         INTEGER PRIMARY KEY,
    gen        INTEGER NOT NULL,    -- 0: given up, to be aborted in the store
    key        TEXT NOT NULL,
    upload_id  TEXT NOT NULL,       -- '': asked for, and no answer yet: the store may have one
    size       INTEGER NOT NULL,    -- bytes planned
    base_etag  TEXT,                -- object that COPY parts read from
    started_ns INTEGER NOT NULL
);
INSERT INTO "upload" VALUES(1,3,'runs/sent.bin','id',16384,NULL,1);
CREATE TABLE upload_part (
    upload INTEGER NOT NULL,
    number INTEGER NOT NULL,        -- 1-based, as S3 counts
    start  INTEGER NOT NULL,
    "end"  INTEGER NOT NULL,
    source TEXT NOT NULL,           -- upload | copy
    etag   TEXT,                    -- NULL: not confirmed yet
    crc64  INTEGER,
    PRIMARY KEY (upload, number)
) WITHOUT ROWID;
INSERT INTO "upload_part" VALUES(1,1,0,8192,'upload','etag',9065536387136578782);
INSERT INTO "upload_part" VALUES(1,2,8192,16384,'upload',NULL,NULL);
CREATE TABLE xattr (
    ino   INTEGER NOT NULL,
    name  BLOB NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (ino, name)
) WITHOUT ROWID;
CREATE INDEX dentry_ino ON dentry (ino);
CREATE INDEX generation_ino ON generation (ino);
CREATE INDEX generation_pending ON generation (state) WHERE state NOT IN ('open','durable');
CREATE INDEX object_dentry ON object (dentry);
CREATE INDEX upload_gen ON upload (gen);
COMMIT;
