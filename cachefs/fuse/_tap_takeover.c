/* Takeover of a live connection from a daemon that died.
 *
 * The kernel is the authority on what was answered: told to resend, it hands every unanswered
 * request over again. So: charge the requests that were being handled, let libfuse negotiate with
 * the saved INIT (its answer goes nowhere, the kernel keeps the first one), ask for the resend, read
 * all that comes, and settle by it what the tables left open: a pending handle whose request is
 * not resent exists, a RELEASE that is not resent is over. All this happens within
 * fuse_session_mount: when pyfuse3.init() returns the tables are true.
 *
 * A rehearsal, on a copy of the state and no connection, ends once libfuse has negotiated.
 */
#include "_tap.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* struct fuse_buf with room for members of later versions. */
struct buffer {
    size_t size;
    int flags;
    void *mem;
    int fd;
    off_t pos;
    size_t mem_size;
    char later[64];
};

#define DEATH_KILLED 1 /* written by the supervisor: SIGKILL from outside */
#define CHARGE_CRASH 5
#define CHARGE_KILL 2

__attribute__((format(printf, 1, 2))) static int refuse(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(tap.why, sizeof tap.why, format, arguments);
    va_end(arguments);
    return -1;
}

/* One store per entry: a kill in the middle charges nobody twice. */
static void charge(void)
{
    uint32_t position = 0, amount = CHARGE_CRASH;
    struct inflight *entry;

    if (tap.state.header->death == DEATH_KILLED)
        amount = CHARGE_KILL;
    while ((entry = table_each(&tap.state.inflight, &position)))
        if (entry->charge & CHARGE_DISPATCHED)
            __atomic_store_n(&entry->charge, (entry->charge & ~CHARGE_DISPATCHED) + amount,
                             __ATOMIC_RELEASE);
}

/* Lookups in one directory: whether they come at once or in turn is nothing to a daemon. */
static bool differ(const struct init_out *old, const struct init_out *new)
{
    return ((old->flags ^ new->flags) & ~INIT_PARALLEL_DIROPS) || old->flags2 != new->flags2;
}

static int compare(const struct init_out *old, const struct init_out *new)
{
    if (old->major != new->major || old->minor != new->minor)
        return refuse("takeover refused: this version speaks FUSE %u.%u, the mount was made with "
                      "%u.%u", new->major, new->minor, old->major, old->minor);
    if (differ(old, new))
        return refuse("takeover refused: this version would negotiate flags %08x %08x, the mount "
                      "was made with %08x %08x", new->flags, new->flags2, old->flags, old->flags2);
    if (new->max_write < old->max_write || new->max_pages < old->max_pages)
        return refuse("takeover refused: this version takes requests of %u bytes, the mount was "
                      "made with %u", new->max_write, old->max_write);
    if (old->time_gran != new->time_gran)
        return refuse("takeover refused: another granularity of times");
    return 0;
}

static int replay_init(void *session)
{
    struct tap_header *saved = tap.state.header;
    uint64_t request[sizeof saved->init_request / sizeof(uint64_t)];
    struct buffer buffer = {.size = saved->init_request_len, .mem = request};
    struct init_out old;

    memcpy(request, saved->init_request, sizeof request);
    memcpy(&old, saved->init_raw, sizeof old);
    tap.replaying = true;
    tap.replay_len = 0;
    tap.process_buf(session, &buffer);
    tap.replaying = false;
    if (tap.replay_len != sizeof tap.replay || tap.replay_error)
        return refuse("takeover refused: libfuse did not accept the saved negotiation");
    return compare(&old, &tap.replay);
}

static int ask_for_resend(void)
{
    struct out_header notify = {.len = sizeof notify, .error = NOTIFY_RESEND};

    if (write(tap.device, &notify, sizeof notify) != (ssize_t)sizeof notify)
        return refuse("takeover refused: the kernel does not send requests again: %s",
                      strerror(errno));
    return 0;
}

static bool keep_poisoned(const struct in_header *header, const char *data, size_t len)
{
    struct poisoned *bigger = realloc(tap.poisoned, (tap.poisoned_count + 1) * sizeof *bigger);
    size_t body = len - sizeof *header;
    struct poisoned *entry;

    if (!bigger)
        return false;
    tap.poisoned = bigger;
    entry = &bigger[tap.poisoned_count];
    *entry = (struct poisoned){.unique = header->unique, .nodeid = header->nodeid,
                               .opcode = header->opcode};
    entry->len = body < POISON_BODY ? body : POISON_BODY;
    entry->body = malloc(entry->len + 1);
    if (!entry->body)
        return false;
    memcpy(entry->body, data + sizeof *header, entry->len);
    tap.poisoned_count++;
    return true;
}

static bool is_ordinary(uint32_t opcode)
{
    return opcode != OP_FORGET && opcode != OP_BATCH_FORGET && opcode != OP_INTERRUPT;
}

static bool enqueue(const char *data, size_t len, uint64_t arrival, bool suspect)
{
    char *copy = malloc(len);

    if (!copy)
        return false;
    memcpy(copy, data, len);
    if (queue_add(arrival, suspect, copy, len))
        return true;
    free(copy);
    return false;
}

/* 1: go on reading; 0: a new request, the resent ones come before it; -1: failed. */
static int take_in(const char *data, size_t len, struct map *resent)
{
    struct in_header header;
    struct inflight *entry;
    bool again, ordinary, suspect = false;
    uint64_t arrival;

    memcpy(&header, data, sizeof header);
    again = (header.unique & UNIQUE_RESEND) != 0;
    ordinary = is_ordinary(header.opcode);
    if (ordinary && again && !map_put(resent, key_of(header.unique), 1))
        return -1;
    if (ordinary)
        tap_record(&header, data + sizeof header, len - sizeof header, false);
    entry = ordinary ? inflight_find(&tap.state, key_of(header.unique)) : NULL;
    arrival = entry ? entry->arrival : ++tap.state.header->arrivals;
    if (entry && again) {
        uint32_t charge = entry->charge & ~CHARGE_DISPATCHED;

        if (charge >= CHARGE_LIMIT)
            return keep_poisoned(&header, data, len) ? 1 : -1;
        suspect = charge > 0;
    }
    if (!enqueue(data, len, arrival, suspect))
        return -1;
    return !ordinary || again;
}

static int read_resent(struct map *resent)
{
    size_t room = tap.replay.max_write + 4096;
    char *data = malloc(room < MIN_READ_BUFFER ? MIN_READ_BUFFER : room);
    int more = 1;

    while (data && more > 0) {
        ssize_t len = read(tap.device, data, room);

        if (len >= (ssize_t)sizeof(struct in_header))
            more = take_in(data, (size_t)len, resent);
        else if (len < 0 && errno == EAGAIN)
            more = 0;
        else if (len >= 0 || (errno != EINTR && errno != ENOENT))
            more = -1;
    }
    free(data);
    if (!data || more < 0)
        return refuse("takeover failed: cannot read the requests left behind: %s", strerror(errno));
    return 0;
}

static void settle_handles(const struct map *resent)
{
    uint32_t position = 0;
    struct handle *handle;
    uint64_t ignored;

    while ((handle = table_each(&tap.state.handles, &position))) {
        if ((handle->state & SLOT_STATE) != SLOT_PENDING)
            continue;
        if (map_get(resent, handle->unique, &ignored))
            table_drop(&tap.state.handles, handle);
        else
            table_publish(&tap.state.handles, handle, (handle->state & ~SLOT_STATE) | SLOT_LIVE);
    }
}

static void settle_requests(const struct map *resent)
{
    uint32_t position = 0;
    struct inflight *entry;
    struct handle *handle;
    uint64_t ignored;

    while ((entry = table_each(&tap.state.inflight, &position))) {
        if (map_get(resent, entry->unique, &ignored) || entry->arrival > tap.arrivals_before)
            continue;
        if (entry->opcode == OP_RELEASE || entry->opcode == OP_RELEASEDIR) {
            handle = handle_find(&tap.state, entry->fh, entry->opcode == OP_RELEASEDIR);
            if (handle)
                table_drop(&tap.state.handles, handle);
        }
        table_drop(&tap.state.inflight, entry);
    }
}

static void answer_poisoned(void)
{
    for (size_t i = 0; i < tap.poisoned_count; i++)
        tap_answer(tap.poisoned[i].unique, EIO);
}

static void settle(const struct map *resent)
{
    settle_handles(resent);
    settle_requests(resent);
    backing_recover();
    queue_start();
}

int tap_take_over(void *session)
{
    struct map resent = {0};
    int result;

    TAP_LOCK();
    charge();
    tap.arrivals_before = tap.state.header->arrivals;
    TAP_UNLOCK();
    if (replay_init(session))
        return -1;
    if (tap.rehearsal)
        return 0;
    if (ask_for_resend())
        return -1;
    TAP_LOCK();
    result = read_resent(&resent);
    if (!result)
        settle(&resent);
    tap.taken_over = !result;
    TAP_UNLOCK();
    map_clear(&resent);
    answer_poisoned();
    return result;
}
