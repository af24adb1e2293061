/* New small files without Python: LOOKUP of a name that is not there, CREATE, and RELEASE.
 *
 * Python grants a directory: its attributes and all its names. In such a directory a file is made
 * here, from a spare one that Python keeps ready: numbers of inode, generation and handle, and an
 * empty cache file that is open. What was done is in the journal (_tap_journal.c), which is in memory,
 * before the caller hears of it; nothing here waits for a disk. Writes and FLUSH are answered as for any new file (_tap_brief.c). Python folds the
 * journal into the database, all records in one transaction.
 *
 * Invariants
 *  - Nothing is served while a request is with Python that could see or change names (`waiting`),
 *    and before Python handles any request it folds. So Python never acts on a state without the
 *    files made here, and what it does in a handler is never overtaken.
 *  - A directory is granted no longer once Python changes it in any way but by CREATE, after which
 *    it tells the new name; of RENAME and RMDIR, which name directories, all grants end.
 *  - A handle is in `open` from its CREATE until its RELEASE or the fold, whichever comes first; the
 *    fold hands it over to Python.
 *  - A request that is sent again after a takeover is Python's: it knows whether it was applied.
 *
 * Locks: `small` needs none, it belongs to the thread that reads requests, which holds the GIL.
 * tap.lock is taken for the maps and tables that others use, and never held over a system call.
 */
#include "_tap_small.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BUDGET (64u << 10) /* as cachefs.fuse.lanes: bytes that are written without Python */
#define OWN_MODE 0600
#define RESERVED ".cachefs"

_Static_assert(sizeof(struct fuse_attr) == 88, "fuse_attr");
_Static_assert(sizeof(struct entry_out) == ENTRY_OUT_SIZE, "fuse_entry_out");
_Static_assert(sizeof(struct attr_out) == 104, "fuse_attr_out");
_Static_assert(sizeof(struct record) == 96, "record of the journal");

/* ---- grants ---- */

struct granted *small_granted(uint64_t ino)
{
    for (size_t i = 0; ino && i < MAX_GRANTED; i++)
        if (small.granted[i].ino == ino)
            return &small.granted[i];
    return NULL;
}

void small_revoke(struct granted *granted)
{
    map_clear(&granted->names);
    granted->ino = 0;
}

/* FNV-1a. Two names of one hash: the later one is Python's. */
uint64_t small_hash(const char *name, size_t len)
{
    uint64_t hash = 0xcbf29ce484222325ull;

    for (size_t i = 0; i < len; i++)
        hash = (hash ^ (unsigned char)name[i]) * 0x100000001b3ull;
    return hash;
}

/* A grant that is over may be given anew. */
static struct granted *granted_now(uint64_t ino)
{
    struct granted *granted = small_granted(ino);

    return granted && tap_now() < granted->until ? granted : NULL;
}

/* Names of printable ASCII. Others are valid as well, but for Python to judge. */
static bool is_plain(const struct granted *granted, const char *name, size_t len)
{
    if (!len || len > granted->name_room || name[len] || !strcmp(name, ".") || !strcmp(name, ".."))
        return false;
    for (size_t i = 0; i < len; i++)
        if (name[i] < 0x20 || name[i] > 0x7e || name[i] == '/')
            return false;
    return !granted->root || strncmp(name, RESERVED, sizeof RESERVED - 1) != 0;
}

static bool is_absent(const struct granted *granted, const char *name, size_t len)
{
    uint64_t there;

    return is_plain(granted, name, len)
        && !map_get(&granted->names, small_hash(name, len), &there);
}

/* ---- CREATE ---- */

static int64_t nanoseconds(const struct timespec *time)
{
    return (int64_t)time->tv_sec * 1000000000 + time->tv_nsec;
}

/* Twice, as in cachefs.vfs.clock: a time that no other file bears. Where the kernel tells changes
 * apart (Linux 6.13 or newer) it is a moment earlier than what it stamps others with from now on, the
 * first write to this file among them. The disk is not asked: the cache file is older, which is
 * known (OpenInode.untouched_ns). */
static bool stamp(int64_t *time)
{
    struct stat first, second;

    if (fchmod(small.clock, OWN_MODE) || fstat(small.clock, &first)
        || fchmod(small.clock, OWN_MODE) || fstat(small.clock, &second))
        return false;
    *time = nanoseconds(&second.st_ctim);
    *time -= *time > nanoseconds(&first.st_ctim);
    return true;
}

static bool is_wanted(const struct create_in *in)
{
    int accmode = (int)in->flags & O_ACCMODE;

    return (accmode == O_WRONLY || accmode == O_RDWR)
        && !(in->flags & (O_DSYNC | O_SYNC | O_DIRECT))
        && !(in->mode & (S_ISUID | S_ISGID)) && (!(in->mode & S_IFMT) || S_ISREG(in->mode));
}

static void describe(struct record *record, const struct in_header *header,
                     const struct create_in *in, const struct granted *granted,
                     const struct spare *spare)
{
    *record = (struct record){
        .kind = RECORD_CREATED, .unique = key_of(header->unique), .fh = spare->fh,
        .parent = granted->ino, .ino = spare->ino, .gen = spare->gen, .file = spare->file,
        .device = spare->device, .mode = S_IFREG | (in->mode & 07777), .uid = header->uid,
        .gid = granted->attr.mode & S_ISGID ? granted->attr.gid : header->gid, .flags = in->flags,
    };
}

static void touch(struct fuse_attr *attr, int64_t time)
{
    attr->mtime = attr->ctime = (uint64_t)(time / 1000000000);
    attr->mtimensec = attr->ctimensec = (uint32_t)(time % 1000000000);
}

static void answer_create(const struct in_header *header, const struct record *record)
{
    struct {
        struct entry_out entry;
        struct open_out open;
    } out = {
        .entry = {.nodeid = record->ino, .entry_valid = small.valid, .attr_valid = small.valid,
                  .entry_valid_nsec = small.valid_nsec, .attr_valid_nsec = small.valid_nsec},
        .open = {.fh = record->fh, .open_flags = OPEN_KEEP_CACHE},
    };
    struct fuse_attr *attr = &out.entry.attr;

    attr->ino = record->ino;
    attr->mode = record->mode;
    attr->nlink = 1;
    attr->uid = record->uid;
    attr->gid = record->gid;
    attr->blksize = 4096;
    touch(attr, record->time);
    attr->atime = attr->mtime;
    attr->atimensec = attr->mtimensec;
    tap_answer_with(header->unique, &out, sizeof out);
}

/* The tables of the tap learn of the handle. */
static bool enlist(const struct spare *spare)
{
    bool done;

    TAP_LOCK();
    done = tap.state.handles.used < tap.state.handles.slots / 2
        && map_put(&tap.files, spare->fh, (uint64_t)spare->fd)
        && map_put(&tap.budgets, spare->fh, BUDGET << 1 | (spare->in_memory ? 1 : 0));
    TAP_UNLOCK();
    return done && map_put(&small.open, spare->fh, (uint64_t)spare->fd);
}

static bool create(const struct in_header *header, const char *body, size_t len)
{
    struct granted *granted = granted_now(header->nodeid);
    struct create_in in;
    const char *name = body + sizeof in;
    struct spare *spare = &small.spares[small.spare_head];
    struct record record;
    size_t name_len;
    uint64_t there;

    if (!granted || !small.spare_count || len < sizeof in + 2 || header->total_extlen)
        return false;
    memcpy(&in, body, sizeof in);
    name_len = strnlen(name, len - sizeof in);
    if (name_len + 1 != len - sizeof in || !is_wanted(&in) || !is_absent(granted, name, name_len))
        return false;
    describe(&record, header, &in, granted, spare);
    record.name_len = (uint16_t)name_len;
    if (!stamp(&record.time) || !enlist(spare)
        || !map_put(&granted->names, small_hash(name, name_len), 1))
        return false;
    if (!journal_append(&record, name)) {
        map_take(&small.open, spare->fh, &there);
        map_take(&granted->names, small_hash(name, name_len), &there);
        return false;
    }
    touch(&granted->attr, record.time);
    small.spare_head = (small.spare_head + 1) % MAX_SPARES;
    small.spare_count--;
    answer_create(header, &record);
    return true;
}

/* ---- the others ---- */

static bool lookup(const struct in_header *header, const char *body, size_t len)
{
    struct granted *granted = granted_now(header->nodeid);

    if (!granted || len < 2 || strnlen(body, len) + 1 != len || !is_absent(granted, body, len - 1))
        return false;
    small.served++;
    tap_answer(header->unique, ENOENT);
    return true;
}

static bool getattr(const struct in_header *header)
{
    struct granted *granted = granted_now(header->nodeid);
    struct attr_out out = {.attr_valid = small.valid, .attr_valid_nsec = small.valid_nsec};

    if (!granted)
        return false;
    out.attr = granted->attr;
    tap_answer_with(header->unique, &out, sizeof out);
    return true;
}

static bool release(const struct in_header *header, const char *body, size_t len)
{
    struct record record = {.kind = RECORD_RELEASED, .unique = key_of(header->unique)};
    uint64_t fd;

    if (len < sizeof record.fh)
        return false;
    memcpy(&record.fh, body, sizeof record.fh);
    if (!map_get(&small.open, record.fh, &fd) || !journal_append(&record, ""))
        return false;
    map_take(&small.open, record.fh, &fd);
    tap_answer(header->unique, 0);
    return true;
}

static bool may_serve(const struct in_header *header)
{
    bool may;

    if (!small.on || (header->unique & UNIQUE_RESEND))
        return false;
    TAP_LOCK();
    may = !tap.waiting.count && !tap.paused && tap.queue_head == tap.queue_count;
    TAP_UNLOCK();
    return may;
}

/* Called without the lock. True: it is answered. */
bool small_serve(const struct in_header *header, const char *body, size_t len)
{
    switch (header->opcode) {
    case OP_LOOKUP:
        return may_serve(header) && lookup(header, body, len);
    case OP_GETATTR:
        return may_serve(header) && getattr(header);
    case OP_CREATE:
        return may_serve(header) && create(header, body, len);
    case OP_RELEASE:
        return may_serve(header) && release(header, body, len);
    default:
        return false;
    }
}

bool small_is_open(uint64_t fh)
{
    uint64_t fd;

    return map_get(&small.open, fh, &fd);
}

/* ---- what goes to Python ---- */

/* Requests that neither see nor change names: files may be made while they are under way. */
static bool is_about_data(uint32_t opcode)
{
    return opcode == OP_READ || opcode == OP_WRITE || opcode == OP_FSYNC || opcode == OP_FALLOCATE;
}

static bool changes_nothing(uint32_t opcode)
{
    switch (opcode) {
    case OP_LOOKUP: case OP_GETATTR: case OP_OPEN: case OP_RELEASE: case OP_FLUSH: case OP_CREATE:
    case OP_READLINK: case OP_STATFS: case OP_GETXATTR: case OP_LISTXATTR: case OP_OPENDIR:
    case OP_READDIR: case OP_READDIRPLUS: case OP_RELEASEDIR: case OP_FSYNCDIR: case OP_ACCESS:
        return true;
    default:
        return is_about_data(opcode);
    }
}

static void revoke_for(const struct in_header *header)
{
    bool all = header->opcode == OP_RENAME || header->opcode == OP_RENAME2
        || header->opcode == OP_RMDIR;

    if (changes_nothing(header->opcode))
        return;
    for (size_t i = 0; i < MAX_GRANTED; i++)
        if (all || small.granted[i].ino == header->nodeid)
            small_revoke(&small.granted[i]);
}

/* Called with the lock held, for a request that will be answered by Python. */
void small_passed(const struct in_header *header)
{
    if (!small.on)
        return;
    revoke_for(header);
    if (!is_about_data(header->opcode)
        && !map_put(&tap.waiting, key_of(header->unique), 1))
        small.on = false;
}
