/* A daemon without Python, libfuse or FUSE device: what the tap needs of all three. */
#include "harness.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

struct tap tap = {.lock = PTHREAD_MUTEX_INITIALIZER, .jobs_ready = PTHREAD_COND_INITIALIZER,
                  .device = -1, .poll = -1, .timer = -1};

int device[2] = {-1, -1}, resent[2] = {-1, -1};
struct ids *ids;
ssize_t (*io_read)(int, void *, size_t, void *);
ssize_t (*io_writev)(int, struct iovec *, int, void *);

struct io {
    ssize_t (*writev)(int, struct iovec *, int, void *);
    ssize_t (*read)(int, void *, size_t, void *);
};

static int fake_mount(void *session, const char *mountpoint)
{
    (void)session, (void)mountpoint;
    return 0;
}

static int fake_fd(void *session)
{
    (void)session;
    return device[1];
}

static int fake_io(void *session, const void *io, size_t size, int fd)
{
    (void)session, (void)fd;
    CHECK(size == 4 * sizeof(void *));
    io_read = ((const struct io *)io)->read;
    io_writev = ((const struct io *)io)->writev;
    return 0;
}

static void reply(uint64_t unique, int error, const void *body, size_t len)
{
    struct out_header header = {.len = (uint32_t)(sizeof header + len), .error = error,
                                .unique = unique};
    struct iovec iov[2] = {{&header, sizeof header}, {(void *)body, len}};

    io_writev(-1, iov, len ? 2 : 1, NULL);
}

static void reply_init(uint64_t unique)
{
    struct init_out out = {.major = 7, .minor = 31, .flags = 1, .max_write = MAX_WRITE};

    reply(unique, 0, &out, sizeof out);
}

struct fuse_buf {
    size_t size;
    int flags;
    void *mem;
};

static void fake_process(void *session, const void *buffer)
{
    const struct in_header *header = ((const struct fuse_buf *)buffer)->mem;

    (void)session;
    CHECK(header->opcode == OP_INIT);
    reply_init(header->unique);
}

int __wrap_ioctl(int fd, unsigned long request, void *argument);

int __wrap_ioctl(int fd, unsigned long request, void *argument)
{
    uint32_t id;

    (void)fd;
    if ((request & 0xff) == 1) {
        CHECK(ids->last + 1 < (int)sizeof ids->open);
        ids->open[ids->last + 1] = 1;
        return ++ids->last;
    }
    memcpy(&id, argument, sizeof id);
    CHECK(id < sizeof ids->open);
    if (!ids->open[id]) {
        errno = ENOENT;
        return -1;
    }
    ids->open[id] = 0;
    return 0;
}

ssize_t __wrap_write(int fd, const void *data, size_t size);

ssize_t __wrap_write(int fd, const void *data, size_t size)
{
    ssize_t result = __real_write(fd, data, size);
    char byte;

    if (fd == device[1] && fd >= 0)
        CHECK(read(resent[0], &byte, 1) == 1);
    return result;
}

static void serve_open(const struct in_header *header, int file, uint64_t fh)
{
    char body[ENTRY_OUT_SIZE + sizeof(struct open_out)] = {0};
    struct open_out out = {.fh = fh, .open_flags = 2};
    size_t start = header->opcode == OP_CREATE ? ENTRY_OUT_SIZE : 0;
    int id;

    if (header->opcode != OP_OPENDIR) {
        TAP_LOCK();
        id = backing_acquire(header->nodeid, file);
        CHECK(id > 0);
        CHECK(map_put(&tap.passthrough, fh, (uint64_t)id));
        TAP_UNLOCK();
    }
    memcpy(body, &header->nodeid, sizeof header->nodeid);
    memcpy(body + start, &out, sizeof out);
    reply(header->unique, 0, body, start + sizeof out);
}

static void serve_release(const struct in_header *header, const char *body)
{
    uint64_t fh;

    memcpy(&fh, body, sizeof fh);
    if (header->opcode == OP_RELEASE) {
        TAP_LOCK();
        backing_release(header->nodeid);
        TAP_UNLOCK();
    }
    reply(header->unique, 0, NULL, 0);
}

static void serve_dump(const struct in_header *header)
{
    static char body[MAX_WRITE];
    uint32_t position = 0, count = 0;
    struct handle *handle;

    while ((handle = table_each(&tap.state.handles, &position))) {
        CHECK((handle->state & SLOT_STATE) == SLOT_LIVE);
        memcpy(body + 16 * count, &handle->fh, 8);
        memcpy(body + 16 * count++ + 8, &handle->nodeid, 8);
        CHECK(count < MAX_WRITE / 16);
    }
    position = 0;
    for (struct backing *entry; (entry = table_each(&tap.state.backing, &position));)
        CHECK(entry->count > 0 && ids->open[entry->id]);
    reply(header->unique, 0, body, 16 * (size_t)count);
}

static void serve(const char *data, int file, uint64_t *next_fh)
{
    struct in_header header;
    const char *body = data + sizeof header;

    memcpy(&header, data, sizeof header);
    if (header.opcode == OP_INIT)
        reply_init(header.unique);
    else if (header.opcode == OP_OPEN || header.opcode == OP_CREATE || header.opcode == OP_OPENDIR)
        serve_open(&header, file, ++*next_fh);
    else if (header.opcode == OP_RELEASE || header.opcode == OP_RELEASEDIR)
        serve_release(&header, body);
    else if (header.opcode == DUMP)
        serve_dump(&header);
    else
        reply(header.unique, 0, NULL, 0);
}

int fuse_session_mount(void *session, const char *mountpoint);

void attach(int state_fd)
{
    tap.real_mount = fake_mount;
    tap.session_fd = fake_fd;
    tap.io_317 = fake_io;
    tap.process_buf = fake_process;
    tap.configured = tap.want_passthrough = tap.takeover_wanted = true;
    tap.stack_depth = 1;
    if (state_attach(&tap.state, state_fd, tap.why, sizeof tap.why)
        || fuse_session_mount(NULL, "/dev/fd/0")) {
        fprintf(stderr, "daemon: %s\n", tap.why);
        _exit(2);
    }
}

/* Takes up to eight requests before it answers them, so that many are in flight. */
void daemon_main(int state_fd, int file, uint64_t epoch)
{
    static char data[8][MAX_WRITE + 4096];
    uint64_t fh = epoch << 32;

    attach(state_fd);
    for (;;) {
        struct pollfd readable = {.fd = tap.poll, .events = POLLIN};
        int count = 0;

        poll(&readable, 1, -1);
        while (count < 8 && io_read(-1, data[count], sizeof data[count], NULL) > 0)
            count++;
        if (errno == ENODEV)
            _exit(0);
        while (count)
            serve(data[--count], file, &fh);
    }
}
