/* Backing ids: the kernel's numbers for files it reads and writes by itself.
 *
 * One id per inode while any of its handles is open: another id for the same inode fails the
 * caller's open with EIO. Ids outlive the daemon, so the table does too. The kernel gives out ids
 * in rising order, which tells the one id that a kill between the ioctl and the table entry lost.
 * The lock is held around the ioctls (they never wait), so there is at most one such id.
 */
#include "_tap.h"

#include <errno.h>
#include <linux/ioctl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};

#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)
#define LOST_IDS 16 /* looked for from the last known one on; two would do for one kill */

/* An id, or -errno. The lock is held by the caller of this and of all below. */
int backing_open(int fd)
{
    struct backing_map map = {.fd = fd};
    int id = ioctl(tap.device, BACKING_OPEN, &map);

    return id < 0 ? -errno : id;
}

int backing_close(int id)
{
    uint32_t number = (uint32_t)id;

    return ioctl(tap.device, BACKING_CLOSE, &number) ? -errno : 0;
}

static int join(struct backing *entry, const struct stat *st)
{
    if (entry->dev != (uint64_t)st->st_dev || entry->ino != (uint64_t)st->st_ino)
        return -EBUSY; /* the inode is pinned to another file */
    entry->count++;
    return entry->id;
}

int backing_acquire(uint64_t inode, int fd)
{
    struct backing *entry = backing_find(&tap.state, inode);
    struct stat st;
    int id;

    if (fstat(fd, &st))
        return -errno;
    if (entry)
        return join(entry, &st);
    entry = table_claim(&tap.state.backing, inode);
    if (!entry)
        return -ENFILE;
    id = backing_open(fd);
    if (id < 0)
        return id;
    entry->id = id;
    entry->count = 1;
    entry->dev = (uint64_t)st.st_dev;
    entry->ino = (uint64_t)st.st_ino;
    tap.state.header->last_backing_id = id;
    table_publish(&tap.state.backing, entry, SLOT_LIVE);
    return id;
}

static void let_go(struct backing *entry)
{
    table_publish(&tap.state.backing, entry, SLOT_PENDING); /* being closed */
    backing_close(entry->id);
    table_drop(&tap.state.backing, entry);
}

/* The handles that remain, or -ENOENT. */
int backing_release(uint64_t inode)
{
    struct backing *entry = backing_find(&tap.state, inode);
    uint64_t unbacked;

    if (map_take(&tap.unbacked, inode, &unbacked)) {
        if (unbacked > 1)
            map_put(&tap.unbacked, inode, unbacked - 1); /* into the place just made free */
        return entry ? (int)entry->count : 0;
    }
    if (!entry)
        return -ENOENT;
    if (entry->count > 1)
        return (int)--entry->count;
    let_go(entry);
    return 0;
}

size_t backing_retain(const struct map *inodes)
{
    uint32_t position = 0;
    struct backing *entry;
    uint64_t ignored;
    size_t closed = 0;

    while ((entry = table_each(&tap.state.backing, &position)))
        if (!map_get(inodes, entry->inode, &ignored)) {
            let_go(entry);
            closed++;
        }
    return closed;
}

/* A kill between the end of an inode's id and the answer to that RELEASE leaves a handle without
 * an id: the RELEASE comes again, and must not count against an id made since. */
static void count_unbacked(uint64_t inode)
{
    uint64_t unbacked = 0;

    map_get(&tap.unbacked, inode, &unbacked);
    if (!map_put(&tap.unbacked, inode, unbacked + 1))
        tap.unrecorded++;
}

static void count_handles(void)
{
    uint32_t position = 0;
    struct handle *handle;
    struct backing *entry;

    while ((entry = table_each(&tap.state.backing, &position)))
        entry->count = 0;
    position = 0;
    while ((handle = table_each(&tap.state.handles, &position))) {
        if (!(handle->state & HANDLE_PASSTHROUGH))
            continue;
        entry = backing_find(&tap.state, handle->nodeid);
        if (entry && (entry->state & SLOT_STATE) == SLOT_LIVE)
            entry->count++;
        else
            count_unbacked(handle->nodeid);
    }
}

static bool known(int id)
{
    uint32_t position = 0;
    struct backing *entry;

    while ((entry = table_each(&tap.state.backing, &position)))
        if (entry->id == id)
            return true;
    return false;
}

/* At takeover, once the handle table is true again: ids of open inodes stay, all others go. */
void backing_recover(void)
{
    uint32_t position = 0;
    struct backing *entry;
    int last = tap.state.header->last_backing_id;

    count_handles();
    while ((entry = table_each(&tap.state.backing, &position)))
        if (!entry->count || (entry->state & SLOT_STATE) == SLOT_PENDING)
            let_go(entry);
    for (int id = last > 0 ? last : 1; id < last + LOST_IDS; id++)
        if (!known(id))
            backing_close(id);
}
