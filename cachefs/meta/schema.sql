-- cachefs metadata schema. The comments here are the authority on every column.
-- Times are nanoseconds since the epoch. Keys are relative to the store's prefix: they are paths
-- below the mountpoint, without a leading slash. Extents are packed by model.extents.

-- One row per fact about this cache: schema_version, store_url, store_endpoint, store_id, node,
-- cache_size (bytes, resolved at first mount), boot (the run of the machine in which the cache is in
-- use; empty: it ended with everything on the disk), pins (JSON list of paths whose copies are never
-- evicted), devices (JSON list of {name, path, kind} of each cache device, by its number), journal (the last record of the journal of small files that is in here), and up to where
-- numbers of inodes, dentries and
-- generations are reserved (next_inode, next_dentry, next_generation).
CREATE TABLE setting (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

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
    listed_ns   INTEGER,            -- directories: when the listing of the bucket that is known began,
                                    -- or when it was made here, so complete by construction (0 in
                                    -- older databases); NULL: never listed
    attrs_known INTEGER NOT NULL DEFAULT 1 -- 0: from a listing, the object's metadata not yet read
);

CREATE TABLE dentry (
    id     INTEGER PRIMARY KEY, -- survives renames; effects and objects refer to it
    parent INTEGER NOT NULL,        -- inode of the directory
    name   BLOB NOT NULL,
    ino    INTEGER NOT NULL,
    UNIQUE (parent, name)
);
CREATE INDEX dentry_ino ON dentry (ino);
CREATE INDEX dentry_parent ON dentry (parent); -- with the id in it: a listing is read piece by piece

-- User extended attributes (name with its namespace, e.g. user.comment).
CREATE TABLE xattr (
    ino   INTEGER NOT NULL,
    name  BLOB NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (ino, name)
) WITHOUT ROWID;

-- One version of a file's content: a cache file plus this row.
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
    error      TEXT,                -- why it is stalled, held or conflicted; NULL otherwise
    copy_device INTEGER,            -- device, one that outlives RAM, of a second cache file: made
    copy_file   INTEGER,            -- for an fsync, or on its way there; NULL: there is none
    copy_size   INTEGER,            -- bytes of it when it was last synced; NULL: it never was
    anchored    INTEGER NOT NULL DEFAULT 0 -- 1: the cache file has been on the disk with its
                                    -- directory entry, so it is there after a power cut
);
CREATE INDEX generation_ino ON generation (ino);
-- Small: most generations are durable, and one that is being written changes state anyway.
CREATE INDEX generation_pending ON generation (state) WHERE state NOT IN ('open','durable');

-- What the bucket holds under a key, as far as this node knows.
CREATE TABLE object (
    key      TEXT PRIMARY KEY,
    dentry   INTEGER,               -- whose content it shows; NULL: that name is gone, to be deleted
                                    -- (or deleted: etag '' and intents, until none can land any more)
    etag     TEXT NOT NULL,         -- '': it is not known to hold anything
    size     INTEGER NOT NULL,
    crc64    INTEGER,               -- full-object CRC64NVME, when this node uploaded it
    gen      INTEGER,               -- generation whose bytes it holds; NULL: another writer's
    stale    INTEGER NOT NULL DEFAULT 0, -- 1: not the entry's content, only a key that its next
                                    -- publish overwrites (it was renamed over this name)
    parts    TEXT,                  -- JSON [[size, crc64], ...] of the last upload, for comparing
    meta     TEXT,                  -- JSON of the object's user metadata as last written or read
    mtime_ns INTEGER NOT NULL,      -- since when it is shown: by our clock, or LastModified; of a
                                    -- deleted key, when it was deleted
    intents  TEXT                   -- JSON [[size, user metadata], ...] of what was sent to this key
                                    -- without an answer: if the key holds one of these, it is ours
) WITHOUT ROWID;
CREATE INDEX object_dentry ON object (dentry);

-- Something the bucket will show. Rows vanish when it does.
CREATE TABLE effect (
    id        INTEGER PRIMARY KEY,
    kind      TEXT NOT NULL,        -- publish | relocate | unpublish
    dentry    INTEGER,              -- publish, relocate: which name; unpublish: the name whose rename
                                    -- left this key behind, NULL when the name itself is gone
    gen       INTEGER,              -- publish: which generation; NULL: attributes, symlink, directory
    key       TEXT,                 -- unpublish: which key; relocate: NULL for the object of the name
                                    -- itself, or the key that what it stood for before is copied from
    class     TEXT NOT NULL,        -- data | small | barrier
    since     INTEGER NOT NULL,     -- smallest end number among the effects it superseded
    "end"     INTEGER NOT NULL,     -- when it was complete
    state     TEXT NOT NULL,        -- pending | blocked | conflicted
    error     TEXT,
    queued_ns INTEGER NOT NULL,     -- last seal; settle counts from here. 0: a person wants it in the store
    first_ns  INTEGER NOT NULL      -- first seal of this run of rewrites; settle_max counts from here
);

-- Multipart uploads under way: the journal that lets an upload go on after a crash.
CREATE TABLE upload (
    id         INTEGER PRIMARY KEY,
    gen        INTEGER NOT NULL,    -- 0: given up, to be aborted in the store
    key        TEXT NOT NULL,
    upload_id  TEXT NOT NULL,       -- '': asked for, and no answer yet: the store may have one
    size       INTEGER NOT NULL,    -- bytes planned
    base_etag  TEXT,                -- object that COPY parts read from
    started_ns INTEGER NOT NULL,
    meta       TEXT                 -- JSON of the user metadata it was begun with
);
CREATE INDEX upload_gen ON upload (gen);

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

-- Ranges of files that are larger than the room there is for them, moved into the bucket while they
-- are written: hidden objects there, each of one range. What has an etag is nowhere else: the cache
-- file has a hole there, or what lies there does not count. Of a file that was in the bucket and is
-- too large to get all of it before it is written to, they are ranges of one hidden copy.
CREATE TABLE span (
    key      TEXT PRIMARY KEY,      -- below .cachefs/, never used twice; or KEY#START: that part of KEY
    gen      INTEGER NOT NULL,      -- 0: no generation's any more (or not yet), to be deleted in the store
    start    INTEGER NOT NULL,
    "end"    INTEGER NOT NULL,
    etag     TEXT,                  -- NULL: asked for; the cache file has the bytes
    crc64    INTEGER,               -- CRC64NVME of the range, where the store told
    asked_ns INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX span_gen ON span (gen);

-- Copies in the warm tier. A row stays as it is when its name moves or goes: that is how what is to be
-- done there is found.
CREATE TABLE warm (
    dentry   INTEGER PRIMARY KEY,   -- whose content the copy shows
    path     TEXT NOT NULL,         -- where it is, below tiers.warm
    gen      INTEGER NOT NULL,      -- generation whose bytes it has; 0: a symlink; negative: those
                                    -- that it had before it was written to again
    size     INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,      -- as the filesystem stored it: whoever touches it is found out
    state    INTEGER NOT NULL DEFAULT 0 -- 0: it is there; 1: removed by retention; 2: lacking, to be
                                    -- copied once the content is in the cache
);
CREATE INDEX warm_gen ON warm (gen);

-- Ring of requests whose mutation is committed: one that is sent again after a takeover is answered
-- without being applied twice. SQLite keeps integers signed; numbers are as the kernel counts them.
CREATE TABLE applied (
    slot    INTEGER PRIMARY KEY,
    request INTEGER NOT NULL
);
