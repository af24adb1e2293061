/* Requests that need no answer from Python: FLUSH, FORGET, GETXATTR of capabilities, and the
 * first bytes of a new file. */
#include "_tap.h"

#include <errno.h>
#include <string.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define CLOSED_MARK "user.cachefs.closed" /* int64, nanoseconds since the epoch */

/* A cache file that was closed says so itself, before close(2) returns: if daemon and mount die before
 * the RELEASE that follows, its last write (mtime) tells whether the close was the last. */
static void mark_closed(uint64_t fh)
{
    struct timespec now;
    uint64_t fd;
    int64_t mark;

    if (!map_get(&tap.files, fh, &fd))
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    mark = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    (void)fsetxattr((int)fd, CLOSED_MARK, &mark, sizeof mark, 0); /* without it: held */
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
enum fate tap_brief_fate(const struct in_header *header, const char *body, size_t len, int *error)
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
    mark_closed(fh);
    return FATE_ANSWERED;
}

/* Called with the lock held. A handle has a budget while its file is new, in the tracked lane, and on
 * a device that does not make anybody wait: all that Python would do of its own for such a write is
 * to look at the cache file's size, which it does in any case. */
enum fate tap_accept_write(const char *body, size_t len, struct small_write *write)
{
    uint64_t budget, fd;

    if (len < sizeof write->in)
        return FATE_PASSED;
    memcpy(&write->in, body, sizeof write->in);
    if (!map_get(&tap.budgets, write->in.fh, &budget) || write->in.size > budget
        || write->in.size != len - sizeof write->in || write->in.offset > INT64_MAX
        || !map_get(&tap.files, write->in.fh, &fd))
        return FATE_PASSED;
    if (!map_put(&tap.budgets, write->in.fh, budget - write->in.size))
        return FATE_PASSED;
    write->fd = (int)fd;
    write->data = body + sizeof write->in;
    return FATE_WRITTEN;
}

/* Called without the lock. False: it did not work out, and Python is to do it again and to say why. */
bool tap_small_write(uint64_t unique, const struct small_write *write)
{
    struct write_out out = {.size = write->in.size};

    if (pwrite(write->fd, write->data, write->in.size, (off_t)write->in.offset)
        != (ssize_t)write->in.size)
        return false;
    tap_answer_with(unique, &out, sizeof out);
    return true;
}
