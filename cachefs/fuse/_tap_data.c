/* READ and WRITE in the tracked lane that need no word of Python.
 *
 * A handle has a reader while its cache file holds all of the object's bytes: what the page cache
 * has of it is answered here, and so is what has arrived of a file that is still being fetched. It
 * has a budget while its file is new and in the tracked lane: all that Python would do of its own for
 * such a write is to look at the cache file's size, which it does in any case. Python gives a new
 * budget with the write that exceeds the old one. What is written to a disk is written by a thread
 * (_tap_patience.c). Whatever does not work out here is Python's to do and to explain.
 */
#define _GNU_SOURCE
#include "_tap.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define LONGEST_READ (1u << 20)
#define MAPPED (256u << 10)
#define PAGE 4096

static bool accept_read(uint64_t ino, const char *body, size_t len, struct data_call *call)
{
    uint64_t reader;

    if (len < sizeof call->read)
        return false;
    memcpy(&call->read, body, sizeof call->read);
    if (call->read.size > LONGEST_READ || call->read.offset > INT64_MAX)
        return false;
    if (!map_get(&tap.readers, call->read.fh, &reader)
        && !tap_has_arrived(ino, &call->read, &reader))
        return false;
    call->fd = (int)(reader >> 1);
    call->in_memory = reader & 1;
    return true;
}

static bool accept_write(const char *body, size_t len, struct data_call *call)
{
    uint64_t budget, fd;

    if (len < sizeof call->write)
        return false;
    memcpy(&call->write, body, sizeof call->write);
    if (!map_get(&tap.budgets, call->write.fh, &budget) || call->write.size > budget >> 1
        || call->write.size != len - sizeof call->write || call->write.offset > INT64_MAX
        || !map_get(&tap.files, call->write.fh, &fd))
        return false;
    if (!map_put(&tap.budgets, call->write.fh, budget - ((uint64_t)call->write.size << 1)))
        return false;
    call->fd = (int)fd;
    call->in_memory = budget & 1;
    return true;
}

/* Called with the lock held. */
enum fate tap_accept_data(const struct in_header *header, const char *body, size_t len,
                          struct data_call *call)
{
    call->opcode = header->opcode;
    call->unique = header->unique;
    call->ino = header->nodeid;
    if (header->opcode == OP_READ)
        return accept_read(header->nodeid, body, len, call) ? FATE_SERVED : FATE_PASSED;
    return accept_write(body, len, call) ? FATE_SERVED : FATE_PASSED;
}

/* Whether the file ends where a short read did. */
static bool is_all(const struct data_call *call, ssize_t got)
{
    struct stat status;

    if (got == (ssize_t)call->read.size)
        return true;
    return !fstat(call->fd, &status)
        && (uint64_t)status.st_size <= call->read.offset + (uint64_t)got;
}

static bool is_resident(void *map, size_t len)
{
    static unsigned char pages[LONGEST_READ / PAGE + 1];

    if (mincore(map, len, pages))
        return false;
    for (size_t i = 0; i < (len + PAGE - 1) / PAGE; i++)
        if (!(pages[i] & 1))
            return false;
    return true;
}

/* Straight from the page cache, if all of it is there: one copy less. A file that is cut off
 * meanwhile is the kernel's EFAULT, not our SIGBUS: this process touches nothing of the mapping. */
static bool answer_mapped(uint64_t unique, const struct data_call *call)
{
    size_t before = call->read.offset % PAGE, len = before + call->read.size;
    bool done = false;
    struct stat status;
    char *map;

    if (fstat(call->fd, &status)
        || (uint64_t)status.st_size < call->read.offset + call->read.size)
        return false;
    map = mmap(NULL, len, PROT_READ, MAP_SHARED, call->fd, (off_t)(call->read.offset - before));
    if (map == MAP_FAILED)
        return false;
    if (is_resident(map, len))
        done = tap_answer_with(unique, map + before, call->read.size) >= 0 || errno != EFAULT;
    munmap(map, len);
    return done;
}

static bool read_now(uint64_t unique, const struct data_call *call)
{
    static char *buffer;
    struct iovec iov = {.iov_len = call->read.size};
    ssize_t got;

    if (!buffer && !(buffer = aligned_alloc(4096, LONGEST_READ)))
        return false;
    iov.iov_base = buffer;
    if (call->read.size >= MAPPED && answer_mapped(unique, call)) {
        __atomic_add_fetch(&tap.read_bytes, (uint64_t)call->read.size, __ATOMIC_RELAXED);
        return true;
    }
    got = preadv2(call->fd, &iov, 1, (off_t)call->read.offset, call->in_memory ? 0 : RWF_NOWAIT);
    if (got < 0 || !is_all(call, got))
        return false;
    __atomic_add_fetch(&tap.read_bytes, (uint64_t)got, __ATOMIC_RELAXED);
    tap_answer_with(unique, buffer, (size_t)got);
    return true;
}

/* False: it did not work out. On any thread. */
bool tap_carry_out(const struct data_call *call)
{
    const char *data = call->message + sizeof(struct in_header) + sizeof call->write;

    if (call->opcode == OP_WRITE)
        return pwrite(call->fd, data, call->write.size, (off_t)call->write.offset)
            == (ssize_t)call->write.size;
    tap_mark_closed(call);
    return true;
}

void tap_finish_data(const struct data_call *call)
{
    struct write_out out = {.size = call->write.size};

    if (call->opcode == OP_WRITE)
        tap_answer_with(call->unique, &out, sizeof out);
    else
        tap_answer(call->unique, 0);
}

/* Called without the lock, on the thread that reads requests alone. FATE_PASSED: Python is to do it;
 * FATE_TAKEN: it will be answered, and the buffer with the request is somebody else's. */
enum fate tap_serve_data(const struct data_call *call)
{
    if (call->opcode == OP_READ)
        return read_now(call->unique, call) ? FATE_SERVED : FATE_PASSED;
    if (!call->in_memory)
        return patience_serve(call);
    if (!tap_carry_out(call))
        return FATE_PASSED;
    tap_finish_data(call);
    return FATE_SERVED;
}
