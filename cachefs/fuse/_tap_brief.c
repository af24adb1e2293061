/* Requests that need no answer from Python: FLUSH, FORGET, INTERRUPT, GETXATTR of capabilities. */
#include "_tap.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#define CLOSED_MARK "user.cachefs.closed" /* int64: mtime in nanoseconds, size */

#define MAX_DEVICES 32
#define FILE_BITS 40

/* One slot for each file that is open for writing, as cachefs.cache.closings has it. */
struct closing {
    uint64_t file;
    int64_t mtime, size; /* when it was closed last */
    uint64_t times;      /* that it was closed */
};

static struct {
    struct closing *slots;
    size_t count;
} tables[MAX_DEVICES];

bool tap_use_close_table(uint32_t device, void *table, size_t size)
{
    if (device >= MAX_DEVICES)
        return false;
    tables[device].slots = table;
    tables[device].count = size / sizeof(struct closing);
    return true;
}

/* False: such a file tells by itself. */
bool tap_note_closing(uint64_t fh, uint32_t device, uint32_t slot, uint64_t file)
{
    if (device >= MAX_DEVICES || slot >= tables[device].count || file >> FILE_BITS)
        return false;
    return map_put(&tap.closings, fh,
                   ((uint64_t)device << 16 | slot) << FILE_BITS | file);
}

/* In the table, for files that are in it. */
static bool note_closed(uint64_t fh, const int64_t like[2])
{
    struct closing *closing;
    uint64_t where;

    if (!map_get(&tap.closings, fh, &where))
        return false;
    closing = &tables[where >> (FILE_BITS + 16)].slots[where >> FILE_BITS & 0xffff];
    if (closing->file != (where & ((1ull << FILE_BITS) - 1)))
        return false; /* another file's by now */
    closing->mtime = like[0];
    closing->size = like[1];
    __atomic_store_n(&closing->times, closing->times + 1, __ATOMIC_RELEASE);
    return true;
}

/* What a file was like when it was closed is noted before close(2) returns: if daemon and mount die
 * before the RELEASE that follows, that tells whether the close was the last. False: it is to be
 * noted on the disk. */
static bool mark_closed(uint64_t fh, struct data_call *call)
{
    struct stat status;
    uint64_t fd;

    if (!map_get(&tap.files, fh, &fd))
        return true;
    call->fd = (int64_t)fd < 0 ? ~(int)fd : (int)fd; /* of a file that is not all in the cache */
    if (fstat(call->fd, &status))
        return true;
    call->like[0] = (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec;
    call->like[1] = status.st_size;
    return note_closed(fh, call->like);
}

void tap_mark_closed(const struct data_call *call)
{
    (void)fsetxattr(call->fd, CLOSED_MARK, call->like, sizeof call->like, 0); /* without it: held */
}

/* Asked at the first write to each file. Attributes are of the kind `user.` here, so nobody has one. */
static bool asks_for_capabilities(const char *body, size_t len)
{
    static const char name[] = "security.capability";
    const size_t before = 8; /* struct fuse_getxattr_in */

    return len == before + sizeof name && !memcmp(body + before, name, sizeof name);
}

/* FLUSH needs no answer from Python, only to be known of; FORGET is of no interest to a filesystem
 * whose inodes live as long as they have a name or a handle. Each costs fifty times as much once it
 * gets to Python. */
enum fate tap_brief_fate(const struct in_header *header, const char *body, size_t len, int *error,
                         struct data_call *call)
{
    uint64_t fh;

    if (!tap.brief)
        return FATE_PASSED;
    if (header->opcode == OP_FORGET || header->opcode == OP_BATCH_FORGET)
        return FATE_TAKEN;
    if (header->opcode == OP_GETXATTR && asks_for_capabilities(body, len)) {
        *error = ENODATA;
        return FATE_ANSWERED;
    }
    if (header->opcode != OP_FLUSH || len < sizeof fh)
        return FATE_PASSED;
    memcpy(&fh, body, sizeof fh);
    if (!small_is_open(fh))
        tap_event(EVENT_FLUSHED, fh, 0, 0, 0);
    *call = (struct data_call){.opcode = OP_FLUSH, .unique = header->unique, .ino = header->nodeid};
    return mark_closed(fh, call) ? FATE_ANSWERED : FATE_SERVED;
}

/* A signal came for a caller that waits. True: libfuse knows nothing of the request. */
bool tap_note_interrupt(const char *body, size_t len)
{
    uint64_t unique;

    if (len < sizeof unique)
        return false;
    memcpy(&unique, body, sizeof unique);
    if (inflight_find(&tap.state, key_of(unique)))
        map_put(&tap.interrupted, key_of(unique), 1);
    return patience_has(unique);
}
