"""What is always true of the database, whenever a daemon dies, and how to mend what is not.

One row of the table per invariant. Queries return a line of text per offence. Mending changes rows
only, and never so that bytes which are nowhere else are forgotten: what has lost its place in the
tree goes to the directory `salvaged` in the root of the mount (`:salvaged` is its inode).
"""

from __future__ import annotations

from dataclasses import dataclass

from cachefs.model.states import GenState

_DIRECTORY = "(i.mode & 61440)=16384"
_REACHED = (
    "WITH RECURSIVE reached(ino) AS (SELECT 1 UNION"
    " SELECT d.ino FROM dentry d JOIN reached r ON d.parent=r.ino)"
)
_ORPHAN_NAME = (
    "CASE WHEN length(name)<200 THEN CAST(id||'-'||CAST(name AS TEXT) AS BLOB)"
    " ELSE CAST('entry-'||id AS BLOB) END"
)
_STATES = ",".join(f"'{state}'" for state in GenState)
_WAITING = "('sealed','uploading','stalled','conflicted')"
_NO_INODE = "ino NOT IN (SELECT ino FROM inode)"
_LINKS = (
    f"CASE WHEN {_DIRECTORY} THEN 2+(SELECT count(*) FROM dentry d JOIN inode c ON c.ino=d.ino"
    " WHERE d.parent=i.ino AND (c.mode & 61440)=16384)"
    " ELSE (SELECT count(*) FROM dentry d WHERE d.ino=i.ino) END"
)
_HAS_NAME = "(i.ino=1 OR EXISTS (SELECT 1 FROM dentry d WHERE d.ino=i.ino))"


@dataclass(frozen=True, slots=True)
class Invariant:
    """One check: a name that stays, what is wrong when it finds something, the query, the cure."""

    name: str
    meaning: str
    sql: str
    mend: tuple[str, ...] = ()
    """Statements that put it right; empty: a person has to decide."""
    leftover: bool = False
    """True for what a daemon that was killed may leave, and the next one clears away by itself."""


def _counter(setting: str, table: str, column: str) -> Invariant:
    top = f"(SELECT coalesce(max({column}),0)+1 FROM {table})"
    now = f"coalesce((SELECT CAST(value AS INTEGER) FROM setting WHERE key='{setting}'),0)"
    return Invariant(
        f"counter-behind-{table}",
        f"numbers of {table}s would be used twice",
        f"SELECT '{setting} is '||{now}||', the next free number '||{top}"
        f" WHERE {now}<{top} AND EXISTS (SELECT 1 FROM {table} WHERE {column}>1)",
        (f"INSERT OR REPLACE INTO setting VALUES('{setting}',CAST({top} AS TEXT))",),
    )


INVARIANTS = (
    Invariant(
        "no-root",
        "the root directory is missing",
        "SELECT 'inode 1' WHERE EXISTS (SELECT 1 FROM dentry)"
        f" AND NOT EXISTS (SELECT 1 FROM inode i WHERE ino=1 AND {_DIRECTORY})",
        (
            "INSERT OR REPLACE INTO inode(ino,mode,uid,gid,nlink,size,atime_ns,mtime_ns,ctime_ns)"
            " VALUES(1,16877,0,0,2,4096,0,0,0)",
        ),
    ),
    Invariant(
        "unknown-file-type",
        "an inode is neither file, directory nor symlink, or a symlink without a target",
        "SELECT 'inode '||ino||' has mode '||printf('%o',mode) FROM inode"
        " WHERE (mode & 61440) NOT IN (32768,16384,40960)"
        " OR ((mode & 61440)=40960)<>(target IS NOT NULL)",
        (
            "UPDATE inode SET mode=(mode & 4095)|CASE WHEN target IS NULL THEN 32768 ELSE 40960 END"
            " WHERE (mode & 61440) NOT IN (32768,16384,40960)"
            " OR ((mode & 61440)=40960)<>(target IS NOT NULL)",
        ),
    ),
    Invariant(
        "negative-size",
        "a size is below zero",
        "SELECT 'inode '||ino FROM inode WHERE size<0 UNION ALL"
        " SELECT 'generation '||gen FROM generation WHERE size<0",
        ("UPDATE inode SET size=0 WHERE size<0",),
    ),
    Invariant(
        "entry-without-inode",
        "a name leads nowhere",
        f"SELECT 'entry '||id||' '||quote(name) FROM dentry WHERE {_NO_INODE}",
        (
            "INSERT INTO inode(ino,mode,uid,gid,nlink,size,atime_ns,mtime_ns,ctime_ns,gen)"
            " SELECT ino,33152,0,0,1,size,created_ns,created_ns,created_ns,gen FROM generation g"
            " WHERE gen=(SELECT max(gen) FROM generation WHERE ino=g.ino)"
            f" AND ino IN (SELECT ino FROM dentry) AND {_NO_INODE}",
            # What the bucket has is found there again.
            f"UPDATE inode SET listed_ns=NULL WHERE ino IN (SELECT parent FROM dentry WHERE"
            f" {_NO_INODE})",
            f"DELETE FROM object WHERE dentry IN (SELECT id FROM dentry WHERE {_NO_INODE})",
            f"DELETE FROM dentry WHERE {_NO_INODE}",
        ),
    ),
    Invariant(
        "entry-without-directory",
        "a name lies in no directory",
        "SELECT 'entry '||id||' '||quote(name)||' in inode '||parent FROM dentry WHERE parent"
        f" NOT IN (SELECT ino FROM inode i WHERE {_DIRECTORY})",
        (
            f"UPDATE dentry SET name={_ORPHAN_NAME},parent=:salvaged WHERE parent NOT IN"
            f" (SELECT ino FROM inode i WHERE {_DIRECTORY})",
        ),
    ),
    Invariant(
        "directory-with-two-names",
        "a directory can be reached in two ways",
        "SELECT 'inode '||i.ino FROM inode i JOIN dentry d ON d.ino=i.ino"
        f" WHERE {_DIRECTORY} GROUP BY i.ino HAVING count(*)>1",
        (
            f"DELETE FROM dentry WHERE ino IN (SELECT ino FROM inode i WHERE {_DIRECTORY})"
            " AND id>(SELECT min(id) FROM dentry o WHERE o.ino=dentry.ino)",
        ),
    ),
    Invariant(
        "directory-cycle",
        "directories that lie within each other, out of reach from the root",
        f"{_REACHED} SELECT 'inode '||d.parent||', entry '||d.id FROM dentry d"
        f" JOIN inode i ON i.ino=d.ino WHERE {_DIRECTORY} AND d.parent NOT IN reached"
        f" AND d.parent IN (SELECT ino FROM dentry)",
        (
            f"{_REACHED} UPDATE dentry SET name={_ORPHAN_NAME},parent=:salvaged WHERE id="
            "(SELECT min(d.id) FROM dentry d JOIN inode i ON i.ino=d.ino"
            f" WHERE {_DIRECTORY} AND d.parent NOT IN reached AND d.parent IN (SELECT ino FROM"
            " dentry))",
        ),
    ),
    Invariant(
        "inode-without-name",
        "an inode counts names and has none",
        f"SELECT 'inode '||ino FROM inode i WHERE nlink<>0 AND NOT {_HAS_NAME}",
        (
            "INSERT INTO dentry SELECT max(coalesce((SELECT max(id) FROM dentry),0),"
            " coalesce((SELECT CAST(value AS INTEGER) FROM setting WHERE key='next_dentry'),0))"
            " +row_number() OVER (), :salvaged, CAST('inode-'||ino AS BLOB), ino"
            f" FROM inode i WHERE nlink<>0 AND NOT {_HAS_NAME}",
        ),
    ),
    Invariant(
        "unlinked-inode",
        "an inode without names whose last handle went with its daemon",
        f"SELECT 'inode '||ino FROM inode i WHERE nlink=0 AND NOT {_HAS_NAME}",
        leftover=True,
    ),
    Invariant(
        "link-count",
        "an inode's link count is not the number of its names",
        f"SELECT 'inode '||i.ino||' counts '||i.nlink||', has '||{_LINKS} FROM inode i"
        f" WHERE {_HAS_NAME} AND i.nlink<>{_LINKS}",
        (f"UPDATE inode AS i SET nlink={_LINKS} WHERE {_HAS_NAME}",),
    ),
    Invariant(
        "name-twice",
        "two entries of a directory bear one name",
        "SELECT 'directory '||parent||', '||quote(name) FROM dentry NOT INDEXED"
        " GROUP BY parent,name HAVING count(*)>1",
    ),
    Invariant(
        "impossible-name",
        "a name that no directory could have",
        "SELECT 'entry '||id||' '||quote(name) FROM dentry WHERE typeof(name)<>'blob'"
        " OR length(name) NOT BETWEEN 1 AND 255 OR name IN (x'2e',x'2e2e')"
        " OR instr(name,x'2f') OR instr(name,x'00')",
        (
            "UPDATE dentry SET name=CAST('entry-'||id AS BLOB) WHERE typeof(name)<>'blob'"
            " OR length(name) NOT BETWEEN 1 AND 255 OR name IN (x'2e',x'2e2e')"
            " OR instr(name,x'2f') OR instr(name,x'00')",
        ),
    ),
    Invariant(
        "current-generation-missing",
        "a file's content is a generation that is not there",
        "SELECT 'inode '||ino||', generation '||gen FROM inode"
        " WHERE gen IS NOT NULL AND gen NOT IN (SELECT gen FROM generation)",
        (
            "UPDATE inode SET gen=(SELECT max(gen) FROM generation g WHERE g.ino=inode.ino)"
            " WHERE gen NOT IN (SELECT gen FROM generation)"
            " AND EXISTS (SELECT 1 FROM generation g WHERE g.ino=inode.ino)",
            "UPDATE inode SET gen=NULL WHERE gen NOT IN (SELECT gen FROM generation) AND EXISTS"
            " (SELECT 1 FROM object o JOIN dentry d ON o.dentry=d.id WHERE d.ino=inode.ino"
            " AND o.etag<>'' AND NOT o.stale)",
        ),
    ),
    Invariant(
        "generation-of-another",
        "a file's content is another file's generation",
        "SELECT 'inode '||i.ino||', generation '||g.gen FROM inode i JOIN generation g"
        " ON g.gen=i.gen WHERE g.ino<>i.ino",
    ),
    Invariant(
        "generation-without-inode",
        "a generation of no file, that nothing will publish",
        f"SELECT 'generation '||gen FROM generation WHERE {_NO_INODE}"
        " AND gen NOT IN (SELECT gen FROM effect WHERE gen IS NOT NULL)",
        (
            f"DELETE FROM generation WHERE {_NO_INODE}"
            " AND gen NOT IN (SELECT gen FROM effect WHERE gen IS NOT NULL)",
        ),
    ),
    Invariant(
        "unknown-state",
        "a generation is in a state that there is not",
        f"SELECT 'generation '||gen||' is '||state FROM generation WHERE state NOT IN ({_STATES})",
        (
            "UPDATE generation SET state='held',error='its state was not known: '||state"
            f" WHERE state NOT IN ({_STATES})",
        ),
    ),
    Invariant(
        "cache-file-shared",
        "two generations claim one cache file",
        "SELECT 'device '||device||', file '||file FROM generation WHERE NOT grows"
        " GROUP BY device,file HAVING count(*)>1",
    ),
    Invariant(
        "nothing-will-publish",
        "a file that is not in the store, and no effect that would bring it there",
        "SELECT 'inode '||i.ino||', generation '||g.gen||' is '||g.state FROM inode i"
        " JOIN generation g ON g.gen=i.gen AND g.ino=i.ino"
        f" WHERE g.state IN {_WAITING} AND EXISTS (SELECT 1 FROM dentry d WHERE d.ino=i.ino)"
        " AND g.gen NOT IN (SELECT gen FROM effect WHERE gen IS NOT NULL)",
        (
            'INSERT INTO effect(kind,dentry,gen,class,since,"end",state,queued_ns,first_ns)'
            " SELECT 'publish',d.id,g.gen,'barrier',top.n,top.n,'pending',0,0"
            " FROM inode i JOIN generation g ON g.gen=i.gen AND g.ino=i.ino"
            ' JOIN dentry d ON d.ino=i.ino, (SELECT coalesce(max("end"),0)+1 AS n FROM effect) top'
            f" WHERE g.state IN {_WAITING}"
            " AND g.gen NOT IN (SELECT gen FROM effect WHERE gen IS NOT NULL)",
        ),
    ),
    Invariant(
        "durable-nowhere",
        "a file is said to be durable, and no object is known that holds it",
        "SELECT 'inode '||i.ino||', generation '||g.gen FROM inode i"
        " JOIN generation g ON g.gen=i.gen WHERE g.state='durable'"
        " AND EXISTS (SELECT 1 FROM dentry d WHERE d.ino=i.ino)"
        " AND NOT EXISTS (SELECT 1 FROM object o JOIN dentry d ON o.dentry=d.id"
        " WHERE d.ino=i.ino AND o.etag<>'')"
        " AND g.gen NOT IN (SELECT gen FROM effect WHERE gen IS NOT NULL)",
        (
            "UPDATE generation SET state='held',error='it was said to be durable, and no object is"
            " known that holds it' WHERE state='durable' AND present IS NULL AND gen IN"
            " (SELECT i.gen FROM inode i WHERE EXISTS (SELECT 1 FROM dentry d WHERE d.ino=i.ino)"
            " AND NOT EXISTS (SELECT 1 FROM object o JOIN dentry d ON o.dentry=d.id"
            " WHERE d.ino=i.ino AND o.etag<>''))"
            " AND gen NOT IN (SELECT gen FROM effect WHERE gen IS NOT NULL)",
        ),
    ),
    Invariant(
        "effect-without-entry",
        "a change of the bucket for a name that is not there",
        "SELECT 'effect '||id||' ('||kind||')' FROM effect WHERE kind<>'unpublish'"
        " AND (dentry IS NULL OR dentry NOT IN (SELECT id FROM dentry))",
        (
            "DELETE FROM effect WHERE kind<>'unpublish'"
            " AND (dentry IS NULL OR dentry NOT IN (SELECT id FROM dentry))",
        ),
    ),
    Invariant(
        "effect-without-generation",
        "a change of the bucket for content that is not there",
        "SELECT 'effect '||id||', generation '||gen FROM effect"
        " WHERE gen IS NOT NULL AND gen NOT IN (SELECT gen FROM generation)",
        ("DELETE FROM effect WHERE gen IS NOT NULL AND gen NOT IN (SELECT gen FROM generation)",),
    ),
    Invariant(
        "effect-without-sense",
        "a change of the bucket that cannot be carried out as it is written down",
        "SELECT 'effect '||id FROM effect WHERE kind NOT IN ('publish','relocate','unpublish')"
        " OR class NOT IN ('data','small','barrier')"
        " OR state NOT IN ('pending','blocked','conflicted')"
        " OR since>\"end\" OR (kind='unpublish' AND key IS NULL)",
        (
            "DELETE FROM effect WHERE kind='unpublish' AND key IS NULL",
            "UPDATE effect SET class='barrier' WHERE class NOT IN ('data','small','barrier')",
            "UPDATE effect SET state='pending'"
            " WHERE state NOT IN ('pending','blocked','conflicted')",
            'UPDATE effect SET since="end" WHERE since>"end"',
        ),
    ),
    Invariant(
        "upload-without-generation",
        "an upload of what is not there any more, to be aborted in the store",
        "SELECT 'upload '||id||' of '||key FROM upload"
        " WHERE gen<>0 AND gen NOT IN (SELECT gen FROM generation)",
        ("UPDATE upload SET gen=0 WHERE gen<>0 AND gen NOT IN (SELECT gen FROM generation)",),
        leftover=True,
    ),
    Invariant(
        "part-without-upload",
        "a part of no upload",
        "SELECT 'upload '||upload||', part '||number FROM upload_part"
        " WHERE upload NOT IN (SELECT id FROM upload)",
        ("DELETE FROM upload_part WHERE upload NOT IN (SELECT id FROM upload)",),
    ),
    Invariant(
        "parts-with-gaps",
        "an upload whose parts are not the whole of it",
        "SELECT 'upload '||u.id||' of '||u.key FROM upload u WHERE u.upload_id<>''"
        ' AND u.gen<>0 AND u.size<>(SELECT coalesce(sum(p."end"-p.start),0) FROM upload_part p'
        " WHERE p.upload=u.id)",
        (
            "UPDATE upload SET gen=0 WHERE upload_id<>'' AND gen<>0 AND size<>"
            '(SELECT coalesce(sum(p."end"-p.start),0) FROM upload_part p WHERE p.upload=upload.id)',
        ),
    ),
    Invariant(
        "span-without-generation",
        "bytes in the store, under a hidden key, of what is not there any more",
        "SELECT 'span '||key FROM span WHERE gen<>0 AND gen NOT IN (SELECT gen FROM generation)",
        ("UPDATE span SET gen=0 WHERE gen<>0 AND gen NOT IN (SELECT gen FROM generation)",),
    ),
    Invariant(
        "span-of-what-is-shown",
        "bytes under a hidden key of a generation that the bucket shows",
        "SELECT 'span '||s.key||' of generation '||s.gen"
        " FROM span s JOIN generation g ON g.gen=s.gen"
        " WHERE g.state='durable'",
    ),
    Invariant(
        "impossible-span",
        "a range under a hidden key that overlaps another, is empty, or reaches beyond its file",
        "SELECT 'span '||s.key||' of generation '||s.gen"
        " FROM span s JOIN generation g ON g.gen=s.gen"
        " WHERE s.etag IS NOT NULL AND (s.start<0 OR s.\"end\"<=s.start OR s.key=''"
        " OR (g.state NOT IN ('open','held') AND s.\"end\">g.size)"
        " OR EXISTS (SELECT 1 FROM span o WHERE o.gen=s.gen AND o.key<>s.key AND o.etag IS NOT NULL"
        ' AND o.start<s."end" AND s.start<o."end"))',
    ),
    Invariant(
        "attribute-of-nobody",
        "an extended attribute of no inode",
        f"SELECT 'inode '||ino||', '||quote(name) FROM xattr WHERE {_NO_INODE}",
        (f"DELETE FROM xattr WHERE {_NO_INODE}",),
    ),
    Invariant(
        "object-of-no-entry",
        "an object of a name that is not there",
        "SELECT key FROM object WHERE dentry IS NOT NULL AND dentry NOT IN (SELECT id FROM dentry)",
        (
            "UPDATE object SET dentry=NULL WHERE dentry IS NOT NULL"
            " AND dentry NOT IN (SELECT id FROM dentry)",
        ),
    ),
    Invariant(
        "impossible-key",
        "a key that no path could have",
        "SELECT quote(key) FROM object WHERE key='' OR substr(key,1,1)='/' OR instr(key,char(0))",
    ),
    Invariant(
        "half-a-copy",
        "a second cache file without a device or without a number",
        "SELECT 'generation '||gen FROM generation WHERE (copy_device IS NULL)<>(copy_file IS NULL)"
        " OR (copy_file IS NULL AND copy_size IS NOT NULL)",
        (
            "UPDATE generation SET copy_device=NULL,copy_file=NULL,copy_size=NULL"
            " WHERE (copy_device IS NULL)<>(copy_file IS NULL)"
            " OR (copy_file IS NULL AND copy_size IS NOT NULL)",
        ),
    ),
    Invariant(
        "unreadable-number",
        "a setting that should be a number is none",
        "SELECT key||' is '||quote(value) FROM setting WHERE key IN ('schema_version','cache_size',"
        "'metrics_port','next_inode','next_dentry','next_generation')"
        " AND (value='' OR value GLOB '*[^0-9]*')",
        (
            "DELETE FROM setting WHERE key IN ('cache_size','metrics_port','next_inode',"
            "'next_dentry','next_generation') AND (value='' OR value GLOB '*[^0-9]*')",
        ),
    ),
    _counter("next_inode", "inode", "ino"),
    _counter("next_dentry", "dentry", "id"),
    _counter("next_generation", "generation", "gen"),
)
"""Every invariant, in the order in which they are to be mended."""
