/* Requests with names, as anybody may send them, in a directory in which the tap makes files by
 * itself; each in memory of just its size, so that a byte read beyond it is noticed. And a paused tap.
 */
#include "harness.h"

#include "../../cachefs/fuse/_tap_small.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { JOURNAL = 1 << 16, DIRECTORIES = 3, CHOICES = 40 };
#define FRONT (sizeof(struct in_header))

static uint64_t numbers = 100, made;
static int journal;

static void grant(void)
{
    struct granted *granted = &small.granted[any(MAX_GRANTED)];
    uint64_t ino = 1 + any(DIRECTORIES);

    if (small_granted(ino))
        granted = small_granted(ino);
    small_revoke(granted);
    granted->ino = granted->attr.ino = ino;
    granted->attr.mode = S_IFDIR | 0755 | (any(2) ? S_ISGID : 0);
    granted->name_room = 1 + any(255);
    granted->root = ino == 1;
    granted->until = tap_now() + 1000000000;
}

static void keep_spares(void)
{
    while (small.spare_count < 4) {
        int fd = memfd_create("spare", 0);

        CHECK(fd >= 0);
        small.spares[(small.spare_head + small.spare_count++) % MAX_SPARES] = (struct spare){
            .ino = numbers++, .gen = numbers, .file = numbers, .fh = numbers++, .fd = fd,
            .in_memory = any(2)};
    }
}

/* Bytes of all kinds, of which names are made of a few only, so that they meet again. */
static void fill(char *body, size_t len)
{
    for (size_t i = 0; i < len; i++)
        body[i] = any(12) ? (char)('a' + any(4)) : (char)any(256);
    if (len && any(8))
        body[len - 1] = 0;
    if (len >= sizeof(struct create_in) && any(8)) {
        struct create_in in = {.flags = (uint32_t)any(3) | (any(8) ? 0 : O_SYNC),
                               .mode = 0644 | (any(8) ? 0 : S_ISUID)};

        memcpy(body, &in, sizeof in);
    }
}

static void release_one(char *body, size_t len)
{
    uint64_t fh = numbers - 1 - any(20);

    if (len >= sizeof fh)
        memcpy(body, &fh, sizeof fh);
}

/* Whether the kernel got just the answers that there are to be. */
static void collect(uint64_t unique, bool expected)
{
    char message[512];
    int answers = 0;
    ssize_t len;

    while ((len = recv(device[0], message, sizeof message, MSG_DONTWAIT)) > 0) {
        struct out_header header;

        CHECK(len >= (ssize_t)sizeof header);
        memcpy(&header, message, sizeof header);
        CHECK(header.len == len && header.unique == unique);
        made += !header.error && len == sizeof header + ENTRY_OUT_SIZE + sizeof(struct open_out);
        answers++;
    }
    CHECK(answers == expected);
}

static void refuse(uint64_t unique)
{
    struct out_header header = {.len = sizeof header, .error = -EIO, .unique = unique};
    struct iovec iov = {&header, sizeof header};

    io_writev(-1, &iov, 1, NULL);
}

static void ask(uint64_t unique)
{
    static const uint32_t opcodes[] = {OP_LOOKUP, OP_LOOKUP, OP_CREATE, OP_CREATE, OP_CREATE,
                                       OP_GETATTR, OP_RELEASE, OP_RELEASE, OP_FLUSH, OP_RENAME,
                                       OP_GETXATTR, OP_READ, OP_WRITE, OP_FORGET, OP_INTERRUPT};
    uint32_t opcode = opcodes[any(sizeof opcodes / sizeof *opcodes)];
    size_t body = any(4) ? any(CHOICES) : any(400);
    char *message = malloc(FRONT + body);
    struct in_header header = {.len = (uint32_t)(FRONT + body), .opcode = opcode,
                               .unique = unique, .nodeid = 1 + any(DIRECTORIES)};

    CHECK(message);
    memcpy(message, &header, FRONT);
    fill(message + FRONT, body);
    if (opcode == OP_RELEASE || opcode == OP_FLUSH || opcode == OP_WRITE)
        release_one(message + FRONT, body);
    CHECK(send(device[0], message, FRONT + body, 0) == (ssize_t)(FRONT + body));
    memset(message, 0xee, FRONT + body);
    if (io_read(-1, message, FRONT + body, NULL) > 0 && opcode != OP_INTERRUPT)
        refuse(unique);
    free(message);
    collect(unique, opcode != OP_FORGET && opcode != OP_INTERRUPT);
}

static bool is_plain(const char *name, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (name[i] < 0x20 || name[i] > 0x7e || name[i] == '/')
            return false;
    return len > 0;
}

/* Every record is whole, and of a name that a file may have. */
static uint64_t created(void)
{
    char *data = malloc(JOURNAL);
    uint64_t found = 0;
    struct record record;

    CHECK(data && pread(journal, data, JOURNAL, small.start) >= small.used);
    for (off_t at = 0; at < small.used; at += record.size) {
        memcpy(&record, data + at, sizeof record);
        CHECK(record.size >= sizeof record + record.name_len && record.size <= small.used - at);
        if (record.kind != RECORD_CREATED)
            continue;
        CHECK(is_plain(data + at + sizeof record, record.name_len));
        CHECK(record.parent >= 1 && record.parent <= DIRECTORIES);
        found++;
    }
    free(data);
    return found;
}

/* As Python does it: what is in the journal goes to the database, and the journal begins anew. */
static void fold(void)
{
    for (size_t i = 0; i < small.open.slots; i++)
        if (small.open.used[i])
            close((int)small.open.values[i]);
    map_clear(&small.open);
    small.used = 0;
}

void run_names(int steps)
{
    uint64_t folded = 0;

    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, device));
    attach(-1);
    journal_prepare();
    journal = small.journal = memfd_create("journal", 0);
    small.clock = memfd_create("clock", 0);
    small.wake = eventfd(0, EFD_NONBLOCK);
    small.room = JOURNAL;
    small.on = tap.brief = true;
    patience_ns = 60000000000; /* each request is over when it was read */
    for (int step = 0; step < steps; step++) {
        keep_spares();
        if (!any(4))
            grant();
        ask(2 + 2 * (uint64_t)step);
        if (small.used > JOURNAL / 2) {
            folded += created();
            fold();
        }
    }
    folded += created();
    CHECK(small.on && made && made == folded);
    printf("%d steps, %llu files\n", steps, (unsigned long long)made);
}

/* It reads nothing, yet notices that the mount has ended. */
void run_paused(void)
{
    char data[MIN_READ_BUFFER];

    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, device));
    attach(-1);
    TAP_LOCK();
    tap_pause(true);
    TAP_UNLOCK();
    CHECK(io_read(-1, data, sizeof data, NULL) == -1 && errno == EINTR);
    close(device[0]);
    CHECK(io_read(-1, data, sizeof data, NULL) == -1 && errno == ENODEV);
    printf("noticed\n");
}
