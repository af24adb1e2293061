/* Requests that need no answer from Python: FLUSH, FORGET, INTERRUPT, GETXATTR of capabilities. */
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

/* A signal came for a caller that waits. */
void tap_note_interrupt(const char *body, size_t len)
{
    uint64_t unique;

    if (len < sizeof unique)
        return;
    memcpy(&unique, body, sizeof unique);
    if (inflight_find(&tap.state, key_of(unique)))
        map_put(&tap.interrupted, key_of(unique), 1);
}
