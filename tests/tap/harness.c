/* A model of the kernel against the tap's C code: no Python, no FUSE device, so that it runs under
 * sanitizers and survives thousands of kills.
 *
 *   harness kills SEED ROUNDS     a daemon killed at random; handle table against the truth
 *   harness tables SEED STEPS     shared table and map against simple arrays
 *   harness malformed SEED STEPS  requests and replies of odd lengths
 *   harness names SEED STEPS      files made without Python, by names of all kinds
 *   harness paused SEED 0         a paused tap whose mount ends
 *   harness crowd SEED 0          more FALLOCATEs than there is room for
 *   harness stalls SEED STEPS     writes to a disk that is slow, or refuses, now and then
 *
 * Device: a SOCK_SEQPACKET pair, one message a request. The parent plays the kernel: it keeps the
 * unanswered requests, sends them again in shuffled order with bit 63 when told to, and knows which
 * handles exist. Built with -Wl,--wrap=ioctl,--wrap=write,--wrap=pwrite: backing ids are numbered
 * here, the write that asks for the resend returns when all has been sent again, as it does in the
 * kernel, and the disk is slow.
 */
#include "harness.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t random_state;

uint64_t any(uint64_t below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % below;
}

/* ---- the kernel ---- */

#define MAX_REQUESTS 256
struct request {
    struct in_header header;
    uint64_t body;
    bool used, lost; /* lost: to be sent again once told to */
};
struct open_handle {
    uint64_t fh, nodeid;
    bool used, closing;
};
static struct request requests[MAX_REQUESTS];
static struct open_handle handles[4096];
static uint64_t unique;
static int resends;

static struct request *request_of(uint64_t number)
{
    for (int i = 0; i < MAX_REQUESTS; i++)
        if (requests[i].used && requests[i].header.unique == number)
            return &requests[i];
    return NULL;
}

static void transmit(const struct request *request)
{
    char message[sizeof request->header + 24] = {0};

    memcpy(message, &request->header, sizeof request->header);
    memcpy(message + sizeof request->header, &request->body, sizeof request->body);
    CHECK(send(device[0], message, sizeof message, 0) == (ssize_t)sizeof message);
}

static struct request *submit(uint32_t opcode, uint64_t nodeid, uint64_t body)
{
    for (int i = 0; i < MAX_REQUESTS; i++) {
        if (requests[i].used)
            continue;
        requests[i] = (struct request){.used = true, .body = body};
        requests[i].header = (struct in_header){.opcode = opcode, .nodeid = nodeid,
                                                .unique = unique += 2};
        requests[i].header.len = sizeof(struct in_header) + 24;
        transmit(&requests[i]);
        return &requests[i];
    }
    return NULL;
}

static void resend(void)
{
    int order[MAX_REQUESTS];

    resends++;
    for (int i = 0; i < MAX_REQUESTS; i++)
        order[i] = i;
    for (int i = MAX_REQUESTS - 1; i > 0; i--) {
        int j = (int)any((uint64_t)i + 1), keep = order[i];
        order[i] = order[j];
        order[j] = keep;
    }
    for (int i = 0; i < MAX_REQUESTS; i++) {
        struct request *request = &requests[order[i]];
        if (!request->used || !request->lost)
            continue;
        request->lost = false;
        request->header.unique |= UNIQUE_RESEND;
        transmit(request);
    }
    CHECK(__real_write(resent[1], "", 1) == 1);
}

static void opened(const struct request *request, const char *body, size_t len)
{
    struct open_out out;
    size_t start = request->header.opcode == OP_CREATE ? ENTRY_OUT_SIZE : 0;
    int free_slot = -1;

    CHECK(len == start + sizeof out);
    memcpy(&out, body + start, sizeof out);
    if (request->header.opcode != OP_OPENDIR)
        CHECK(out.open_flags == OPEN_PASSTHROUGH && ids->open[out.backing_id]);
    for (int i = 0; i < 4096; i++) {
        CHECK(!handles[i].used || handles[i].fh != out.fh);
        if (!handles[i].used)
            free_slot = i;
    }
    CHECK(free_slot >= 0);
    handles[free_slot] =
        (struct open_handle){.used = true, .fh = out.fh, .nodeid = request->header.nodeid};
    if (request->header.opcode == OP_OPENDIR)
        handles[free_slot].nodeid |= 1ull << 40; /* the model's mark for directories */
}

static void released(uint64_t fh)
{
    for (int i = 0; i < 4096; i++)
        if (handles[i].used && handles[i].fh == fh)
            handles[i].used = false;
}

static int open_count(void)
{
    int count = 0;

    for (int i = 0; i < 4096; i++)
        count += handles[i].used;
    return count;
}

static void compare_dump(const char *body, size_t len)
{
    CHECK(len % 16 == 0 && len / 16 == (size_t)open_count());
    for (size_t at = 0; at < len; at += 16) {
        uint64_t fh, nodeid;
        bool found = false;

        memcpy(&fh, body + at, 8);
        memcpy(&nodeid, body + at + 8, 8);
        for (int i = 0; i < 4096 && !found; i++)
            found = handles[i].used && handles[i].fh == fh
                && (handles[i].nodeid & ~(1ull << 40)) == nodeid;
        CHECK(found);
    }
}

/* One message of the daemon; false when there is none within `timeout` ms. */
static bool receive(int timeout)
{
    static char message[MAX_WRITE + 4096];
    struct pollfd readable = {.fd = device[0], .events = POLLIN};
    struct out_header header;
    struct request *request;
    ssize_t len;

    if (poll(&readable, 1, timeout) != 1)
        return false;
    len = recv(device[0], message, sizeof message, 0);
    if (len < (ssize_t)sizeof header)
        return false;
    memcpy(&header, message, sizeof header);
    CHECK(header.len == len);
    if (!header.unique) {
        CHECK(header.error == NOTIFY_RESEND);
        resend();
        return true;
    }
    request = request_of(header.unique);
    if (!request)
        return true; /* answered twice: the kernel says ENOENT */
    CHECK(!header.error);
    if (request->header.opcode == OP_OPEN || request->header.opcode == OP_CREATE
        || request->header.opcode == OP_OPENDIR)
        opened(request, message + sizeof header, (size_t)len - sizeof header);
    else if (request->header.opcode == OP_RELEASE || request->header.opcode == OP_RELEASEDIR)
        released(request->body);
    else if (request->header.opcode == DUMP)
        compare_dump(message + sizeof header, (size_t)len - sizeof header);
    request->used = false;
    return true;
}

static void close_one(void)
{
    int start = (int)any(4096);

    for (int i = 0; i < 4096; i++) {
        struct open_handle *handle = &handles[(start + i) % 4096];
        if (!handle->used || handle->closing)
            continue;
        handle->closing = submit(handle->nodeid >> 40 ? OP_RELEASEDIR : OP_RELEASE,
                                 handle->nodeid & ~(1ull << 40), handle->fh) != NULL;
        return;
    }
}

static void act(void)
{
    static const uint32_t opens[] = {OP_OPEN, OP_CREATE, OP_OPENDIR};

    switch (any(5)) {
    case 0:
    case 1:
        submit(opens[any(3)], 2 + any(20), 0);
        break;
    case 2:
    case 3:
        close_one();
        break;
    default:
        submit(OP_WRITE, 2 + any(20), 0);
    }
}

static pid_t start(int state_fd, int file, uint64_t epoch)
{
    pid_t pid;

    close(resent[0]);
    close(resent[1]);
    CHECK(!pipe(resent));
    pid = fork();
    if (!pid) {
        close(device[0]);
        daemon_main(state_fd, file, epoch);
    }
    return pid;
}

/* The daemon read some of what was sent; what it did not read stays in the socket, as it would in
 * the kernel's queue. Here all unanswered requests are taken back and sent again instead, after
 * draining the socket, which is harder on the tap. */
static void kill_daemon(pid_t pid)
{
    static char message[MAX_WRITE + 4096];
    int status;

    kill(pid, SIGKILL);
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status));
    while (receive(0)) /* replies that were written before it died count */
        ;
    while (recv(device[1], message, sizeof message, MSG_DONTWAIT) > 0)
        ;
    for (int i = 0; i < MAX_REQUESTS; i++)
        requests[i].lost = requests[i].used;
}

static void quiesce(void)
{
    for (int i = 0; i < MAX_REQUESTS;)
        if (!requests[i].used)
            i++;
        else
            CHECK(receive(5000));
}

static void run_kills(int rounds)
{
    int state_fd = memfd_create("state", 0), file = memfd_create("file", 0), in_flight = 0;
    uint64_t epoch = 1;
    struct tap_header *header;
    struct init_in init = {.major = 7, .minor = 45, .flags = 1 | INIT_EXT,
                           .flags2 = INIT2_PASSTHROUGH | INIT2_HAS_RESEND};
    char message[sizeof(struct in_header) + sizeof init];
    struct in_header in = {.len = sizeof message, .opcode = OP_INIT, .unique = unique += 2};
    pid_t pid;

    CHECK(!ftruncate(state_fd, TAP_STATE_SIZE));
    header = mmap(NULL, TAP_STATE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, device));
    memcpy(message, &in, sizeof in);
    memcpy(message + sizeof in, &init, sizeof init);
    requests[0] = (struct request){.used = true, .header = in};
    CHECK(send(device[0], message, sizeof message, 0) == (ssize_t)sizeof message);
    pid = start(state_fd, file, epoch);
    CHECK(receive(5000));
    while (!(header->flags & FLAG_TAKEOVER_POSSIBLE))
        usleep(100);
    for (int round = 0; round < rounds; round++) {
        int steps = (int)any(60);

        for (int i = 0; i < steps; i++) {
            if (any(3))
                act();
            receive(0);
        }
        usleep((useconds_t)any(300));
        kill_daemon(pid);
        for (int i = 0; i < MAX_REQUESTS; i++)
            in_flight += requests[i].used;
        header->death = 1;
        pid = start(state_fd, file, ++epoch);
        for (uint64_t early = any(3); early--;) { /* killed while it takes over */
            usleep((useconds_t)any(500));
            if (any(2))
                receive(5000);
            kill_daemon(pid);
            pid = start(state_fd, file, ++epoch);
        }
        quiesce(); /* nothing is killed so often that it must be given up on */
        CHECK(submit(DUMP, 1, 0));
        quiesce();
    }
    while (open_count()) {
        close_one();
        quiesce();
    }
    CHECK(submit(DUMP, 1, 0));
    quiesce();
    kill_daemon(pid);
    for (int id = 0; id <= ids->last; id++)
        CHECK(!ids->open[id]);
    printf("%d kills, %d resends, %d requests in flight at a kill, %d ids\n", rounds, resends,
           in_flight, ids->last);
}

/* ---- tables ---- */

static void run_tables(int steps)
{
    enum { KEYS = 200 };
    struct tap_state state;
    char why[100];
    int count[KEYS] = {0};
    struct map map = {0};
    uint64_t in_map[KEYS] = {0}, value;

    CHECK(!state_attach(&state, -1, why, sizeof why));
    state.backing.slots = 256; /* so that it fills up */
    for (int step = 0; step < steps; step++) {
        uint64_t key = any(KEYS);
        struct backing *entry = backing_find(&state, key);

        CHECK(!!entry == !!count[key]);
        if (any(2)) {
            entry = table_claim(&state.backing, key);
            CHECK(!!entry == (state.backing.used < 224));
            if (entry) {
                table_publish(&state.backing, entry, SLOT_LIVE);
                count[key]++;
            }
        } else if (entry) {
            table_drop(&state.backing, entry);
            count[key]--;
        }
        if (any(2)) {
            CHECK(map_put(&map, key, in_map[key] = any(1000) + 1));
        } else {
            CHECK(map_take(&map, key, &value) == !!in_map[key]);
            in_map[key] = 0;
        }
        key = any(KEYS);
        CHECK(map_get(&map, key, &value) == !!in_map[key]);
        CHECK(!in_map[key] || value == in_map[key]);
    }
    for (uint64_t key = 0; key < KEYS; key++)
        while (count[key]--)
            table_drop(&state.backing, backing_find(&state, key));
    for (uint32_t i = 0; i < 256; i++) /* everything dropped: no dead slot is left */
        CHECK(((struct backing *)state.backing.base)[i].state == SLOT_EMPTY);
    map_clear(&map);
    state_detach(&state);
    printf("%d steps\n", steps);
}

/* ---- malformed messages ---- */

static void run_malformed(int steps)
{
    static char data[MAX_WRITE];

    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, device));
    attach(-1);
    for (int step = 0; step < steps; step++) {
        struct in_header header = {.opcode = (uint32_t)any(70), .unique = 2 + 2 * any(50),
                                   .nodeid = any(5)};
        size_t len = any(300), parts = 1 + any(3);
        struct out_header out = {.error = any(3) ? 0 : -5, .unique = 2 * any(60)};
        struct iovec iov[4] = {{&out, sizeof out}};

        memcpy(data, &header, sizeof header);
        if (len >= 1 && any(4))
            CHECK(send(device[0], data, len, 0) == (ssize_t)len);
        io_read(-1, data, sizeof data, NULL);
        for (size_t i = 1; i <= parts; i++)
            iov[i] = (struct iovec){data, any(200)};
        io_writev(-1, iov, 1 + (int)parts * (int)any(2), NULL);
        while (recv(device[0], data, sizeof data, MSG_DONTWAIT) > 0)
            ;
    }
    printf("%d steps\n", steps);
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    signal(SIGPIPE, SIG_IGN);
    random_state = strtoull(argv[2], NULL, 10) * 0x9e3779b97f4a7c15ull + 1;
    ids = mmap(NULL, sizeof *ids, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!strcmp(argv[1], "kills"))
        run_kills(atoi(argv[3]));
    else if (!strcmp(argv[1], "tables"))
        run_tables(atoi(argv[3]));
    else if (!strcmp(argv[1], "names"))
        run_names(atoi(argv[3]));
    else if (!strcmp(argv[1], "paused"))
        run_paused();
    else if (!strcmp(argv[1], "crowd"))
        run_crowd();
    else if (!strcmp(argv[1], "stalls"))
        run_stalls(atoi(argv[3]));
    else if (!strcmp(argv[1], "ranks"))
        run_ranks(atoi(argv[3]));
    else
        run_malformed(atoi(argv[3]));
    return 0;
}
