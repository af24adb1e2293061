/* Calls that a disk may hold up, for requests that are served here.
 *
 * A thread makes the call and answers the kernel. The thread that reads requests, without which
 * nothing goes on, waits for it as long as a disk that works takes: PATIENCE. Then it leaves, and
 * the request with the memory that it is in is the other thread's. As long as the disk was so slow a
 * moment ago, nobody waits for it at all. Where no thread is free, a request is Python's.
 *
 * Of several writers each would wait for all the others that way. So a large write is left as soon as
 * there is something else to read: WRITES_AT_ONCE of them, the other threads are for disks that stall.
 * That says nothing of the disk, and a writer that is alone keeps to one thread and one buffer.
 *
 * What is left cannot be overtaken by what must come after it: the kernel holds the lock of the
 * file until a write or a flush is answered, which keeps others' writes, truncate, fallocate, fsync
 * and flush, and it sends no RELEASE of a handle with an unanswered request, so its descriptor stays
 * open. Python is told of what was written (EVENT_WRITTEN) before the caller is, and asks
 * `patience_left` before it does anything to the bytes of an open file by itself. A takeover finds
 * the request in the table, an upgrade waits until it is not there.
 *
 * A call that failed is for Python to do and to explain. Was it left, the request goes back into the
 * queue that is read before the device.
 */
#include "_tap.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORKERS 8
#define PATIENCE 10000000     /* ns; an idle disk takes microseconds, a busy machine a few ms */
#define DISTRUST 1000000000   /* ns, as cachefs.cache.heartbeat */
#define WITH_PYTHON 1000000   /* ns of waiting before others may have Python: taking it back is slow */
#define SPINS 100             /* turns before a thread goes to sleep */
#define LARGE (64u << 10)     /* bytes; a smaller write is made sooner than left */
#define FIRST_LOOK 50000      /* ns until a write is looked after, then twice as long each time */

enum { IDLE, GIVEN, LEFT, ANSWERING, REFUSED };

struct worker {
    uint32_t state; /* changes from GIVEN on are made by whoever is first */
    bool started;
    struct data_call call;
};

static struct worker workers[MAX_WORKERS];
static int64_t slow_until;
int64_t patience_ns = PATIENCE;

static void sleep_while(uint32_t *word, uint32_t value, const struct timespec *timeout)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, timeout, NULL, 0);
}

static void wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static uint32_t state_of(const struct worker *worker)
{
    return __atomic_load_n(&worker->state, __ATOMIC_ACQUIRE);
}

static void set_state(struct worker *worker, uint32_t state)
{
    __atomic_store_n(&worker->state, state, __ATOMIC_RELEASE);
}

static bool change(struct worker *worker, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(&worker->state, &from, to, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

/* ---- the thread that makes the call ---- */

static void distrust(void)
{
    __atomic_store_n(&slow_until, tap_now() + DISTRUST, __ATOMIC_RELAXED);
}

static void finish_left(struct worker *worker, bool done)
{
    struct data_call *call = &worker->call;
    bool write = call->opcode == OP_WRITE;

    TAP_LOCK();
    if (done && write)
        tap_event(EVENT_WRITTEN, call->write.fh, 0, call->write.offset, call->write.size);
    else if (!done)
        queue_give_back(call->message, call->message_len);
    TAP_UNLOCK();
    if (done)
        tap_finish_data(call);
    if (done && write)
        buffer_give_back(call->message);
    TAP_LOCK();
    set_state(worker, IDLE);
    TAP_UNLOCK();
}

static void carry_out(struct worker *worker)
{
    int64_t began = tap_now();
    bool done = tap_carry_out(&worker->call);

    if (tap_now() - began > patience_ns)
        distrust();
    if (!change(worker, GIVEN, done ? ANSWERING : REFUSED)) {
        finish_left(worker, done);
        return;
    }
    if (done) {
        tap_finish_data(&worker->call);
        set_state(worker, IDLE);
    }
    wake(&worker->state);
}

static bool has_work(uint32_t state)
{
    return state == GIVEN || state == LEFT;
}

static void *work(void *argument)
{
    struct worker *worker = argument;

    for (;;) {
        uint32_t state = state_of(worker);

        for (int i = 0; i < SPINS && !has_work(state); i++)
            state = state_of(worker);
        if (has_work(state))
            carry_out(worker);
        else
            sleep_while(&worker->state, state, NULL);
    }
    return NULL;
}

static bool start(struct worker *worker)
{
    pthread_t thread;
    sigset_t all, before;

    sigfillset(&all); /* signals are for Python's main thread */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    worker->started = !pthread_create(&thread, NULL, work, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (worker->started) {
        pthread_setname_np(thread, "cachefs-disk");
        pthread_detach(thread);
    }
    return worker->started;
}

/* ---- the thread that reads requests ---- */

static struct worker *idle_worker(void)
{
    for (struct worker *worker = workers; worker < workers + MAX_WORKERS; worker++)
        if (state_of(worker) == IDLE && (worker->started || start(worker)))
            return worker;
    return NULL;
}

/* True: from now on the request is the other thread's. */
static bool leave(struct worker *worker)
{
    bool left;

    TAP_LOCK();
    left = change(worker, GIVEN, LEFT);
    if (left && worker->call.opcode == OP_WRITE)
        buffer_take(worker->call.message);
    TAP_UNLOCK();
    return left;
}

/* From then on the buffer with the request is not looked at any more. */
static bool is_over(const struct worker *worker)
{
    return state_of(worker) != GIVEN;
}

/* Until it is over and answered, or for so many nanoseconds. */
static void wait_for(struct worker *worker, int64_t nanoseconds)
{
    int64_t until = tap_now() + nanoseconds, left = nanoseconds;
    uint32_t state = state_of(worker);

    while ((state == GIVEN || state == ANSWERING) && left > 0) {
        struct timespec timeout = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};

        sleep_while(&worker->state, state, &timeout);
        state = state_of(worker);
        left = until - tap_now();
    }
}

/* The same, or until there is something else to read: true. Whose write is answered goes on with the
 * next one as a rule, so the thread that makes it need not wake this one. */
static bool wait_or_read_on(const struct worker *worker, int64_t nanoseconds)
{
    int64_t until = tap_now() + nanoseconds, left = nanoseconds, look = FIRST_LOOK;

    while (!is_over(worker) && left > 0) {
        if (tap_more_waits(look < left ? look : left))
            return true;
        look *= 2;
        left = until - tap_now();
    }
    return false;
}

static bool may_read_on(const struct worker *worker)
{
    int busy = 0;

    if (worker->call.opcode != OP_WRITE || worker->call.write.size < LARGE)
        return false;
    for (const struct worker *each = workers; each < workers + MAX_WORKERS; each++)
        busy += state_of(each) != IDLE;
    return busy <= WRITES_AT_ONCE;
}

static bool wait_a_while(struct worker *worker, int64_t nanoseconds, bool read_on)
{
    if (read_on)
        return wait_or_read_on(worker, nanoseconds);
    wait_for(worker, nanoseconds);
    return false;
}

/* True: there is something else to read. */
static bool wait_patiently(struct worker *worker)
{
    int64_t patience = patience_ns, first = patience < WITH_PYTHON ? patience : WITH_PYTHON;
    bool read_on = may_read_on(worker), more = wait_a_while(worker, first, read_on);

    if (more || is_over(worker) || patience <= WITH_PYTHON)
        return more;
    if (tap.without_python)
        tap.without_python(true);
    more = wait_a_while(worker, patience - first, read_on);
    if (tap.without_python)
        tap.without_python(false);
    return more;
}

/* True: waiting for it was in vain. */
static bool is_slow(struct worker *worker)
{
    return !wait_patiently(worker) && !is_over(worker);
}

enum fate patience_serve(const struct data_call *call)
{
    struct worker *worker = idle_worker();

    if (!worker)
        return FATE_PASSED;
    worker->call = *call;
    set_state(worker, GIVEN);
    wake(&worker->state);
    if (tap_now() >= __atomic_load_n(&slow_until, __ATOMIC_RELAXED) && is_slow(worker))
        distrust();
    if (!is_over(worker) && leave(worker))
        return FATE_TAKEN;
    if (state_of(worker) != REFUSED)
        return FATE_SERVED;
    set_state(worker, IDLE);
    return FATE_PASSED;
}

/* Called with the lock held. */
unsigned patience_left(uint64_t ino)
{
    unsigned count = 0;

    for (struct worker *worker = workers; worker < workers + MAX_WORKERS; worker++)
        count += state_of(worker) == LEFT && worker->call.ino == ino;
    return count;
}

static bool is_at_work(uint32_t state)
{
    return state == LEFT || state == ANSWERING;
}

/* Called with the lock held. */
bool patience_has(uint64_t unique)
{
    for (struct worker *worker = workers; worker < workers + MAX_WORKERS; worker++)
        if (is_at_work(state_of(worker)) && worker->call.unique == unique)
            return true;
    return false;
}
