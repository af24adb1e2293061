/* Every request and every reply passes here.
 *
 * Request: recorded in the in-flight table before libfuse sees it. Reply: OPEN, CREATE and OPENDIR
 * enter the handle table as pending before the kernel can see the reply and become live after it;
 * RELEASE and RELEASEDIR leave it after the reply. So whatever instant a kill picks, the next
 * daemon can tell from the requests the kernel sends again which of the two had happened.
 *
 * Runs on the daemon's main thread (holding the GIL), on pyfuse3's notify thread and on the
 * fallocate workers. The lock is held for table work only, never while reading or writing the
 * device.
 */
#include "_tap.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_PATCHED 256 /* the largest reply the tap changes: a CREATE reply, 144 bytes */
#define MAX_EVENTS 1000000

int64_t tap_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

uint64_t key_of(uint64_t unique)
{
    return unique & ~UNIQUE_RESEND;
}

void tap_event(uint32_t kind, uint64_t fh, uint32_t mode, uint64_t offset, uint64_t length)
{
    if (tap.event_count == tap.event_room) {
        size_t room = tap.event_room ? tap.event_room * 2 : 64;
        struct event *bigger = room > MAX_EVENTS ? NULL : realloc(tap.events, room * sizeof *bigger);

        if (!bigger) {
            tap.unrecorded++;
            return;
        }
        tap.events = bigger;
        tap.event_room = room;
    }
    tap.events[tap.event_count++] =
        (struct event){.kind = kind, .mode = mode, .fh = fh, .offset = offset, .length = length};
}

/* ---- requests ---- */

static bool unanswered(uint32_t opcode)
{
    return opcode == OP_FORGET || opcode == OP_BATCH_FORGET || opcode == OP_INTERRUPT
        || opcode == OP_NOTIFY_REPLY || opcode == OP_INIT;
}

static void describe(struct inflight *entry, const char *body, size_t body_len)
{
    switch (entry->opcode) {
    case OP_OPEN:
    case OP_OPENDIR:
    case OP_CREATE: /* all three begin with the open flags */
        if (body_len >= sizeof entry->open_flags)
            memcpy(&entry->open_flags, body, sizeof entry->open_flags);
        break;
    case OP_RELEASE:
    case OP_RELEASEDIR:
    case OP_FALLOCATE: /* all three begin with the handle */
        if (body_len >= sizeof entry->fh)
            memcpy(&entry->fh, body, sizeof entry->fh);
        break;
    default:
        break;
    }
}

void tap_record(const struct in_header *header, const char *body, size_t body_len, bool dispatched)
{
    uint64_t key = key_of(header->unique);
    struct inflight *entry = inflight_find(&tap.state, key);
    uint32_t mark = dispatched ? CHARGE_DISPATCHED : 0;

    if (entry) {
        __atomic_store_n(&entry->charge, entry->charge | mark, __ATOMIC_RELEASE);
        return;
    }
    entry = table_claim(&tap.state.inflight, key);
    if (!entry) {
        tap.unrecorded++;
        return;
    }
    entry->opcode = header->opcode;
    entry->nodeid = header->nodeid;
    entry->arrival = ++tap.state.header->arrivals;
    entry->charge = mark;
    describe(entry, body, body_len);
    table_publish(&tap.state.inflight, entry, SLOT_LIVE);
}

static void count(const struct in_header *header)
{
    uint64_t counters, opcode = header->opcode < OP_MAX ? header->opcode : 0;

    tap.counts[opcode]++;
    if (map_get(&tap.watched, header->nodeid, &counters))
        ((uint64_t *)(uintptr_t)counters)[opcode]++;
}

static void save_init_request(const struct in_header *header, const char *data, size_t len)
{
    struct tap_header *saved = tap.state.header;

    tap.init_unique = header->unique;
    if (len > sizeof saved->init_request || saved->init_state)
        return;
    memcpy(saved->init_request, data, len);
    saved->init_request_len = (uint32_t)len;
}

/* Whether the kernel asks for set-user-id and set-group-id to be cleared along with the request
 * (HANDLE_KILLPRIV_V2): it does so for callers without CAP_FSETID only. */
static bool kills_privileges(uint32_t opcode, const char *body, size_t len)
{
    static const struct {
        uint32_t opcode, offset, bit;
    } places[] = {{OP_SETATTR, 0, 1u << 11}, {OP_OPEN, 4, 1}, {OP_WRITE, 20, 1u << 2},
                  {OP_CREATE, 12, 1}};
    uint32_t word;

    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (places[i].opcode == opcode && len >= places[i].offset + sizeof word) {
            memcpy(&word, body + places[i].offset, sizeof word);
            return word & places[i].bit;
        }
    return false;
}

/* Which times a SETATTR sets to that of its arrival (FATTR_ATIME_NOW, FATTR_MTIME_NOW): pyfuse3 shows
 * the kernel's idea of it, which may be a tick behind what other changes were stamped with. */
static uint32_t times_of_now(uint32_t opcode, const char *body, size_t len)
{
    uint32_t valid;

    if (opcode != OP_SETATTR || len < sizeof valid)
        return 0;
    memcpy(&valid, body, sizeof valid);
    return valid & (SETATTR_ATIME_NOW | SETATTR_MTIME_NOW);
}

static void note_passed(const struct in_header *header)
{
    if (unanswered(header->opcode))
        return;
    TAP_LOCK();
    small_passed(header);
    TAP_UNLOCK();
}

/* True when libfuse is to see the request, of which `*len` bytes are there then; false when the tap
 * has taken it over. */
bool tap_admit(char *data, size_t *len)
{
    struct in_header header;
    const char *body = data + sizeof header;
    enum fate fate = FATE_PASSED;
    struct data_call call = {0};
    int error = 0;

    memcpy(&header, data, sizeof header);
    TAP_LOCK();
    count(&header);
    if (header.opcode == OP_INIT)
        save_init_request(&header, data, *len);
    if (header.opcode == OP_INTERRUPT && tap_note_interrupt(body, *len - sizeof header))
        fate = FATE_TAKEN;
    tap.current = key_of(header.unique);
    tap.current_pid = header.pid;
    if (!unanswered(header.opcode))
        tap_record(&header, body, *len - sizeof header, true);
    if (header.opcode == OP_FALLOCATE)
        fate = tap_fallocate(data, len, &error);
    else if (header.opcode == OP_READ || header.opcode == OP_WRITE)
        fate = tap_accept_data(&header, body, *len - sizeof header, &call);
    else if (fate == FATE_PASSED)
        fate = tap_brief_fate(&header, body, *len - sizeof header, &error, &call);
    memcpy(&header, data, sizeof header);
    tap.kills_privileges = kills_privileges(header.opcode, body, *len - sizeof header);
    tap.times_of_now = times_of_now(header.opcode, body, *len - sizeof header);
    TAP_UNLOCK();
    if (fate == FATE_ANSWERED)
        tap_answer(header.unique, error);
    if (fate == FATE_SERVED) {
        call.message = data;
        call.message_len = *len;
        fate = tap_serve_data(&call);
    }
    if (fate == FATE_PASSED && !small_serve(&header, body, *len - sizeof header))
        note_passed(&header);
    else if (fate == FATE_PASSED)
        fate = FATE_SERVED;
    tap.answered = fate == FATE_ANSWERED || fate == FATE_SERVED;
    return fate == FATE_PASSED;
}

/* ---- replies ---- */

struct reply {
    struct out_header header;
    struct inflight request; /* a copy; .state 0 when the request is not in the table */
    char body[MAX_PATCHED];
    size_t body_len;
    bool patched, abandoned;
};

static size_t gather(char *to, size_t room, const struct iovec *iov, int count)
{
    size_t total = 0;

    for (int i = 0; i < count; i++) {
        if (iov[i].iov_len > room - total)
            return 0;
        if (iov[i].iov_len)
            memcpy(to + total, iov[i].iov_base, iov[i].iov_len);
        total += iov[i].iov_len;
    }
    return total;
}

static void refuse(struct reply *reply, int error)
{
    reply->header.error = -error;
    reply->body_len = 0;
    reply->patched = reply->abandoned = true;
}

static void set_passthrough(struct reply *reply, struct open_out *out, uint64_t backing_id)
{
    /* Passthrough excludes every other way to open but NOFLUSH; KEEP_CACHE above all. */
    out->open_flags = (out->open_flags & OPEN_NOFLUSH) | OPEN_PASSTHROUGH;
    out->backing_id = (int32_t)backing_id;
    memcpy(reply->body + reply->body_len - sizeof *out, out, sizeof *out);
    reply->patched = true;
}

static void add_flags(struct reply *reply, struct open_out *out, uint32_t flags)
{
    out->open_flags |= flags;
    memcpy(reply->body + reply->body_len - sizeof *out, out, sizeof *out);
    reply->patched = true;
}

static uint32_t listing_flags(uint64_t fh)
{
    uint64_t flags;

    return map_take(&tap.listings, fh, &flags) ? (uint32_t)flags : 0;
}

static void prepare_open(struct reply *reply)
{
    uint32_t opcode = reply->request.opcode, state = SLOT_PENDING;
    size_t expected = sizeof(struct open_out) + (opcode == OP_CREATE ? ENTRY_OUT_SIZE : 0);
    uint64_t nodeid = reply->request.nodeid, backing_id;
    struct open_out out;
    struct handle *handle;

    if (reply->body_len != expected)
        return;
    memcpy(&out, reply->body + reply->body_len - sizeof out, sizeof out);
    if (opcode == OP_CREATE)
        memcpy(&nodeid, reply->body, sizeof nodeid);
    if (opcode == OP_OPENDIR) {
        state |= HANDLE_DIR;
        add_flags(reply, &out, listing_flags(out.fh));
    } else if (map_take(&tap.passthrough, out.fh, &backing_id)) {
        set_passthrough(reply, &out, backing_id);
        state |= HANDLE_PASSTHROUGH;
    } else if (tap.brief && !(reply->request.open_flags & O_ACCMODE)) {
        /* nobody asks when a descriptor for reading was closed */
        add_flags(reply, &out, OPEN_NOFLUSH);
    }
    reply->request.fh = out.fh;
    handle = table_claim(&tap.state.handles, out.fh);
    if (!handle) { /* a handle the next daemon would not know of must not come into being */
        refuse(reply, ENFILE);
        return;
    }
    handle->open_flags = reply->request.open_flags;
    handle->nodeid = nodeid;
    handle->unique = reply->request.unique;
    table_publish(&tap.state.handles, handle, state);
}

static void prepare_init(struct reply *reply)
{
    struct tap_header *saved = tap.state.header;
    struct init_out out;
    struct init_in in;

    if (reply->body_len != sizeof out || saved->init_request_len < sizeof(struct in_header) + 16)
        return;
    memset(&in, 0, sizeof in);
    memcpy(&in, saved->init_request + sizeof(struct in_header),
           saved->init_request_len >= sizeof(struct in_header) + sizeof in ? sizeof in : 16);
    memcpy(&out, reply->body, sizeof out);
    memcpy(saved->init_raw, &out, sizeof out);
    saved->init_raw_len = sizeof out;
    tap_patch_init(&out, &in);
    memcpy(saved->init_reply, &out, sizeof out);
    saved->init_reply_len = sizeof out;
    memcpy(reply->body, &out, sizeof out);
    reply->patched = true;
}

static bool is_open(uint32_t opcode)
{
    return opcode == OP_OPEN || opcode == OP_CREATE || opcode == OP_OPENDIR;
}

static bool is_release(uint32_t opcode)
{
    return opcode == OP_RELEASE || opcode == OP_RELEASEDIR;
}

static void prepare(struct reply *reply, const struct iovec *iov, int count)
{
    struct inflight *entry = inflight_find(&tap.state, key_of(reply->header.unique));
    bool init = tap.init_unique && reply->header.unique == tap.init_unique;

    if (entry)
        reply->request = *entry;
    if (reply->header.error || !(init || is_open(reply->request.opcode)))
        return;
    reply->body_len = gather(reply->body, sizeof reply->body, iov, count);
    if (init)
        prepare_init(reply);
    else
        prepare_open(reply);
}

static struct handle *pending_handle(const struct reply *reply)
{
    uint32_t position = 0;
    struct handle *handle;

    while ((handle = table_next(&tap.state.handles, reply->request.fh, &position)))
        if ((handle->state & SLOT_STATE) == SLOT_PENDING && handle->unique == reply->request.unique)
            return handle;
    return NULL;
}

static void finish_open(const struct reply *reply, bool sent)
{
    struct handle *handle = pending_handle(reply);

    if (handle && sent)
        table_publish(&tap.state.handles, handle, (handle->state & ~SLOT_STATE) | SLOT_LIVE);
    else if (handle)
        table_drop(&tap.state.handles, handle);
    if (reply->abandoned || (handle && !sent))
        tap_event(EVENT_ABANDONED, reply->request.fh, 0, 0, 0);
}

static void finish_release(const struct reply *reply)
{
    bool dir = reply->request.opcode == OP_RELEASEDIR;
    struct handle *handle = handle_find(&tap.state, reply->request.fh, dir);
    uint64_t fd;

    if (handle)
        table_drop(&tap.state.handles, handle);
    if (!dir) {
        map_take(&tap.files, reply->request.fh, &fd);
        map_take(&tap.closings, reply->request.fh, &fd);
        map_take(&tap.budgets, reply->request.fh, &fd);
        map_take(&tap.readers, reply->request.fh, &fd);
    }
}

static void finish_init(void)
{
    struct tap_header *saved = tap.state.header;
    struct init_out out;

    tap.init_unique = 0;
    if (saved->init_reply_len != sizeof out)
        return;
    memcpy(&out, saved->init_reply, sizeof out);
    __atomic_store_n(&saved->init_state, 1, __ATOMIC_RELEASE);
    if (tap.takeover_wanted && (out.flags2 & INIT2_HAS_RESEND))
        __atomic_or_fetch(&saved->flags, FLAG_TAKEOVER_POSSIBLE, __ATOMIC_RELEASE);
}

/* After the reply was written. ENOENT says that nobody waits for it any more; any other refusal
 * ends the request as well. */
static void finish(const struct reply *reply, bool sent)
{
    struct inflight *entry;
    uint64_t waited;

    map_take(&tap.waiting, key_of(reply->header.unique), &waited);
    map_take(&tap.interrupted, key_of(reply->header.unique), &waited);
    if (tap.init_unique && reply->header.unique == tap.init_unique && sent && !reply->header.error)
        finish_init();
    if (!reply->request.state)
        return;
    if (is_open(reply->request.opcode))
        finish_open(reply, sent);
    else if (is_release(reply->request.opcode))
        finish_release(reply);
    entry = inflight_find(&tap.state, reply->request.unique);
    if (entry)
        table_drop(&tap.state.inflight, entry);
    queue_answered(reply->request.unique);
}

static ssize_t send(struct reply *reply, struct iovec *iov, int count, size_t total)
{
    struct iovec own[2] = {{&reply->header, sizeof reply->header}, {reply->body, reply->body_len}};

    if (!reply->patched)
        return writev(tap.device, iov, count);
    reply->header.len = (uint32_t)(sizeof reply->header + reply->body_len);
    if (writev(tap.device, own, reply->body_len ? 2 : 1) < 0)
        return -1;
    return (ssize_t)total;
}

static ssize_t reply_with(struct iovec *iov, int count, size_t total)
{
    struct reply reply;
    ssize_t sent;
    int error;
    bool resumed;

    memset(&reply, 0, offsetof(struct reply, body));
    reply.body_len = 0;
    reply.patched = reply.abandoned = false;
    memcpy(&reply.header, iov[0].iov_base, sizeof reply.header);
    TAP_LOCK();
    resumed = tap_resume_fallocate(&reply.header);
    if (!resumed)
        prepare(&reply, iov + 1, count - 1);
    TAP_UNLOCK();
    if (resumed)
        return (ssize_t)total;
    sent = send(&reply, iov, count, total);
    error = errno;
    TAP_LOCK();
    finish(&reply, sent >= 0);
    TAP_UNLOCK();
    errno = error;
    return sent;
}

ssize_t tap_answer(uint64_t unique, int error)
{
    struct out_header header = {.len = sizeof header, .error = -error, .unique = unique};
    struct iovec iov = {&header, sizeof header};

    return reply_with(&iov, 1, sizeof header);
}

ssize_t tap_answer_with(uint64_t unique, const void *body, size_t len)
{
    struct out_header header = {.len = (uint32_t)(sizeof header + len), .unique = unique};
    struct iovec iov[2] = {{&header, sizeof header}, {(void *)body, len}};

    return reply_with(iov, 2, header.len);
}

ssize_t tap_writev(int fd, struct iovec *iov, int count, void *userdata)
{
    struct out_header header;
    size_t total = 0;

    (void)fd, (void)userdata;
    if (count < 1 || iov[0].iov_len < sizeof header) {
        errno = EINVAL;
        return -1;
    }
    memcpy(&header, iov[0].iov_base, sizeof header);
    for (int i = 0; i < count; i++)
        total += iov[i].iov_len;
    if (tap.replaying && header.unique) { /* libfuse answers the INIT that the tap fed to it */
        tap.replay_error = header.error;
        tap.replay_len = gather((char *)&tap.replay, sizeof tap.replay, iov + 1, count - 1);
        return (ssize_t)total;
    }
    if (!header.unique) /* a notification */
        return writev(tap.device, iov, count);
    return reply_with(iov, count, total);
}
