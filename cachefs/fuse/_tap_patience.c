/* Calls that a disk may hold up, for requests that are served here.
 *
 * A thread makes the call and answers the kernel. The thread that reads requests, without which
 * nothing goes on, waits for it as long as a disk that works takes: PATIENCE. Then it leaves, and
 * the request with the memory that it is in is the other thread's. As long as the disk was so slow a
 * moment ago, nobody waits for it at all. Where no thread is free, a request is Python's.
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

enum { IDLE, GIVEN, LEFT, ANSWERING, DONE, REFUSED };

struct worker {
    uint32_t state; /* changes from GIVEN on are made by whoever is first */
    bool started;
    int64_t began;
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
    bool done = tap_carry_out(&worker->call);

    if (tap_now() - worker->began > patience_ns)
        distrust();
    if (!change(worker, GIVEN, done ? ANSWERING : REFUSED)) {
        finish_left(worker, done);
        return;
    }
    if (done) {
        tap_finish_data(&worker->call);
        set_state(worker, DONE);
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
    if (left)
        distrust();
    return left;
}

static bool is_over(uint32_t state)
{
    return state == DONE || state == REFUSED;
}

/* Until it is over, or for so many nanoseconds. Once it is being answered it is over in a moment. */
static void wait_for(struct worker *worker, int64_t nanoseconds)
{
    int64_t until = tap_now() + nanoseconds, left = nanoseconds;
    uint32_t state = state_of(worker);

    while (!is_over(state) && (left > 0 || state == ANSWERING)) {
        struct timespec timeout = {.tv_sec = left > 0 ? left / 1000000000 : 0,
                                   .tv_nsec = left > 0 ? left % 1000000000 : 1000};

        sleep_while(&worker->state, state, &timeout);
        state = state_of(worker);
        left = until - tap_now();
    }
}

static void wait_patiently(struct worker *worker)
{
    int64_t patience = patience_ns;

    if (tap_now() < __atomic_load_n(&slow_until, __ATOMIC_RELAXED))
        return;
    wait_for(worker, patience < WITH_PYTHON ? patience : WITH_PYTHON);
    if (is_over(state_of(worker)) || patience <= WITH_PYTHON)
        return;
    if (tap.without_python)
        tap.without_python(true);
    wait_for(worker, patience - WITH_PYTHON);
    if (tap.without_python)
        tap.without_python(false);
}

enum fate patience_serve(const struct data_call *call)
{
    struct worker *worker = idle_worker();
    bool refused;

    if (!worker)
        return FATE_PASSED;
    worker->call = *call;
    worker->began = tap_now();
    set_state(worker, GIVEN);
    wake(&worker->state);
    wait_patiently(worker);
    if (!is_over(state_of(worker)) && leave(worker))
        return FATE_TAKEN;
    wait_for(worker, 0);
    refused = state_of(worker) == REFUSED;
    set_state(worker, IDLE);
    return refused ? FATE_PASSED : FATE_SERVED;
}

/* Called with the lock held. */
unsigned patience_left(uint64_t ino)
{
    unsigned count = 0;

    for (struct worker *worker = workers; worker < workers + MAX_WORKERS; worker++)
        count += state_of(worker) == LEFT && worker->call.ino == ino;
    return count;
}

/* Called with the lock held. */
bool patience_has(uint64_t unique)
{
    for (struct worker *worker = workers; worker < workers + MAX_WORKERS; worker++)
        if (state_of(worker) == LEFT && worker->call.unique == unique)
            return true;
    return false;
}
