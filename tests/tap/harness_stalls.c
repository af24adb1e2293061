/* A disk that takes its time, or refuses: writes by the tap's threads, among other requests.
 *
 * As the kernel does it, a file has one write at a time, and nothing else that the kernel keeps apart
 * from writes. Each write says by its first bytes what the disk does with it.
 */
#include "harness.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { FILES = 12, ROOM = 2 * MAX_WRITE, QUICK = 'q', SLOW = 's', REFUSES = 'r', SLOWLY_REFUSES = 'R' };
#define FRONT (sizeof(struct in_header))
#define START (FRONT + sizeof(struct write_in))

struct file {
    int fd;
    uint64_t waits_for; /* unique of what is unanswered, 0: nothing */
    bool flush;
    char expected[ROOM];
};

static struct file files[FILES];
static uint64_t last_unique, by_python, interrupted;
static bool stalling;
static const char *kinds = "qqqqqqsrR";
static uint64_t large = 1; /* of four writes */
static int at_once, most_at_once; /* writes that are being made */

static void count_at_once(int change)
{
    int now = __atomic_add_fetch(&at_once, change, __ATOMIC_SEQ_CST);

    if (now > __atomic_load_n(&most_at_once, __ATOMIC_SEQ_CST))
        __atomic_store_n(&most_at_once, now, __ATOMIC_SEQ_CST);
}

ssize_t __real_pwrite(int fd, const void *data, size_t size, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *data, size_t size, off_t offset);

ssize_t __wrap_pwrite(int fd, const void *data, size_t size, off_t offset)
{
    char kind = stalling && size ? *(const char *)data : QUICK;

    count_at_once(1);
    if (kind == SLOW || kind == SLOWLY_REFUSES)
        nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
    count_at_once(-1);
    if (kind == REFUSES || kind == SLOWLY_REFUSES) {
        errno = ENOSPC;
        return -1;
    }
    return __real_pwrite(fd, data, size, offset);
}

static void transmit(uint32_t opcode, uint64_t ino, char *message, size_t len)
{
    struct in_header header = {.len = (uint32_t)len, .opcode = opcode, .nodeid = ino,
                               .unique = last_unique += 2};

    memcpy(message, &header, sizeof header);
    CHECK(send(device[0], message, len, MSG_DONTWAIT) == (ssize_t)len);
}

static void write_some(uint64_t fh, struct file *file)
{
    static char message[START + MAX_WRITE];
    uint32_t size = any(4) < large ? MAX_WRITE : 1 + (uint32_t)any(2000);
    struct write_in in = {.fh = fh, .offset = any(ROOM - size), .size = size};

    for (size_t i = 0; i < in.size; i++)
        message[START + i] = (char)(last_unique + i * 3);
    message[START] = kinds[any(strlen(kinds))];
    memcpy(message + FRONT, &in, sizeof in);
    memcpy(file->expected + in.offset, message + START, in.size);
    transmit(OP_WRITE, fh, message, START + in.size);
    file->waits_for = last_unique;
}

static void flush(uint64_t fh, struct file *file)
{
    char message[FRONT + 24] = {0};

    memcpy(message + FRONT, &fh, sizeof fh);
    transmit(OP_FLUSH, fh, message, sizeof message);
    file->waits_for = last_unique;
}

static void interrupt(const struct file *file)
{
    char message[FRONT + 8];

    memcpy(message + FRONT, &file->waits_for, 8);
    transmit(OP_INTERRUPT, 0, message, sizeof message);
    interrupted++;
}

/* As Python: whatever it gets it does, and answers. */
static void handle(const char *data)
{
    struct in_header header;
    struct write_in in;
    struct write_out out;
    struct out_header reply = {.len = sizeof reply};
    struct iovec iov[2] = {{&reply, sizeof reply}, {&out, 0}};

    memcpy(&header, data, sizeof header);
    if (header.opcode == OP_INTERRUPT)
        return;
    reply.unique = header.unique;
    if (header.opcode == OP_WRITE) {
        memcpy(&in, data + FRONT, sizeof in);
        CHECK(__real_pwrite(files[in.fh].fd, data + START, in.size, (off_t)in.offset)
              == (ssize_t)in.size);
        out = (struct write_out){.size = in.size};
        iov[1].iov_len = sizeof out;
        reply.len += (uint32_t)sizeof out;
        by_python++;
        TAP_LOCK();
        map_put(&tap.budgets, in.fh, 1ull << 40);
        TAP_UNLOCK();
    }
    io_writev(-1, iov, 2, NULL);
}

static void collect(void)
{
    char message[512];
    ssize_t len;

    while ((len = recv(device[0], message, sizeof message, MSG_DONTWAIT)) > 0) {
        struct out_header header;
        int found = 0;

        memcpy(&header, message, sizeof header);
        CHECK(len == header.len && !header.error);
        for (struct file *file = files; file < files + FILES; file++)
            if (file->waits_for == header.unique) {
                file->waits_for = 0;
                found++;
            }
        CHECK(found == 1);
    }
}

static bool all_answered(void)
{
    for (struct file *file = files; file < files + FILES; file++)
        if (file->waits_for)
            return false;
    return true;
}

static void act(void)
{
    uint64_t fh = any(FILES);
    struct file *file = &files[fh];

    if (file->waits_for && !any(8))
        interrupt(file);
    else if (!file->waits_for && any(8))
        write_some(fh, file);
    else if (!file->waits_for)
        flush(fh, file);
}

static void attend(void)
{
    static char data[MAX_WRITE + 4096];

    while (io_read(-1, data, sizeof data, NULL) > 0)
        handle(data);
    collect();
}

static uint64_t written_late(void)
{
    uint64_t count = 0;

    for (size_t i = 0; i < tap.event_count; i++)
        count += tap.events[i].kind == EVENT_WRITTEN;
    return count;
}

static void start_stalling(int64_t patience)
{
    int room = 4 * MAX_WRITE;

    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, device));
    CHECK(!setsockopt(device[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room));
    attach(-1);
    stalling = tap.brief = true;
    patience_ns = patience;
    for (uint64_t fh = 0; fh < FILES; fh++) {
        files[fh].fd = memfd_create("file", 0);
        CHECK(!ftruncate(files[fh].fd, ROOM));
        map_put(&tap.files, fh, (uint64_t)files[fh].fd);
        map_put(&tap.budgets, fh, 1ull << 40);
    }
}

/* How many writes were left at a time, at most. */
static unsigned let_them_write(int steps)
{
    unsigned most = 0;

    for (int step = 0; step < steps || !all_answered(); step++) {
        unsigned left = 0;

        for (uint64_t i = any(4); step < steps && i < 4; i++)
            act();
        attend();
        TAP_LOCK();
        for (uint64_t fh = 0; fh < FILES; fh++)
            left += patience_left(fh);
        TAP_UNLOCK();
        most = left > most ? left : most;
        if (step >= steps)
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    return most;
}

static void compare(void)
{
    static char found[ROOM];

    for (struct file *file = files; file < files + FILES; file++) {
        CHECK(pread(file->fd, found, ROOM, 0) == ROOM);
        CHECK(!memcmp(found, file->expected, ROOM));
    }
}

void run_stalls(int steps)
{
    unsigned most;

    start_stalling(1000000);
    most = let_them_write(steps);
    compare();
    TAP_LOCK();
    CHECK(!tap.state.inflight.used && !tap.interrupted.count);
    CHECK(most > 1 && by_python && interrupted && written_late());
    TAP_UNLOCK();
    printf("%u left at a time, %llu by Python\n", most, (unsigned long long)by_python);
}

/* The disk works, and takes its time: none is given up, some are made while others are read. */
void run_ranks(int steps)
{
    kinds = "s";
    large = 3;
    start_stalling(60000000000);
    let_them_write(steps);
    compare();
    TAP_LOCK();
    CHECK(!tap.state.inflight.used && !tap.interrupted.count && !by_python && written_late());
    TAP_UNLOCK();
    CHECK(most_at_once > 1 && most_at_once <= WRITES_AT_ONCE + 1);
    printf("%d at a time\n", most_at_once);
}

/* No worker gets anywhere: the disk stands still. */
void run_crowd(void)
{
    char message[FRONT + sizeof(struct fallocate_in)], data[MIN_READ_BUFFER];
    struct fallocate_in in = {.fh = 1, .length = 1};
    struct out_header header;
    int refused = 0;

    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, device));
    attach(-1);
    map_put(&tap.files, 1, 0);
    tap.workers = 4;
    for (int i = 0; i < 5000; i++) {
        memcpy(message + FRONT, &in, sizeof in);
        transmit(OP_FALLOCATE, 1, message, sizeof message);
        CHECK(io_read(-1, data, sizeof data, NULL) == -1);
        while (recv(device[0], &header, sizeof header, MSG_DONTWAIT) > 0)
            refused += header.error == -EINTR;
    }
    CHECK(refused > 0 && tap.waiting_jobs + (unsigned)refused == 5000);
    CHECK(tap.state.inflight.used == tap.waiting_jobs && !tap.unrecorded);
    printf("%d refused\n", refused);
}
