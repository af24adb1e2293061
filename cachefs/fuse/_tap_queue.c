/* Requests read ahead of their dispatch, and the descriptor pyfuse3 waits on.
 *
 * The kernel sends unanswered requests again in the order of a hash, yet a RELEASE must not be
 * overtaken by what its caller did next. So a takeover reads them all, and this queue gives them
 * out in the order in which they first arrived. Requests that were being handled when a daemon
 * died ("suspects") start one at a time, each with SUSPECT_TIME before the next may follow, so that
 * a request which kills the daemon is alone when it does, and others are not blamed with it. While
 * the queue holds anything the device itself is not read: new requests come after old ones.
 *
 * pyfuse3 waits for the session's descriptor to become readable. Here that is an epoll descriptor
 * over the device and a timer; the timer is due exactly while the queue has something to give.
 */
#include "_tap.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define SUSPECT_TIME 20000000    /* 20 ms */
#define ISOLATION_TIME 500000000 /* 500 ms for all suspects together */

static void watch_device(bool on)
{
    struct epoll_event event = {.events = on ? EPOLLIN : 0};

    epoll_ctl(tap.poll, EPOLL_CTL_MOD, tap.device, &event);
}

int queue_open_poll(void)
{
    struct epoll_event event = {.events = EPOLLIN};

    tap.poll = epoll_create1(EPOLL_CLOEXEC);
    tap.timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (tap.poll < 0 || tap.timer < 0
        || epoll_ctl(tap.poll, EPOLL_CTL_ADD, tap.device, &event)
        || epoll_ctl(tap.poll, EPOLL_CTL_ADD, tap.timer, &event))
        return -1;
    return 0;
}

static void arm(int64_t delay)
{
    struct itimerspec when = {.it_value = {.tv_sec = delay / 1000000000,
                                           .tv_nsec = delay % 1000000000}};

    timerfd_settime(tap.timer, 0, &when, NULL);
}

static bool suspect_running(int64_t now)
{
    return tap.suspect && now < tap.suspect_until && now < tap.isolation_until;
}

static void wake(void)
{
    int64_t now = tap_now();

    if (tap.queue_head == tap.queue_count || tap.paused)
        arm(0);
    else
        arm(suspect_running(now) ? tap.suspect_until - now : 1);
}

bool queue_in_use(void)
{
    bool in_use;

    TAP_LOCK();
    in_use = tap.paused || tap.queue_head < tap.queue_count;
    TAP_UNLOCK();
    return in_use;
}

/* Takes ownership of data. */
bool queue_add(uint64_t arrival, bool suspect, char *data, size_t len)
{
    if (tap.queue_count == tap.queue_room) {
        size_t room = tap.queue_room ? tap.queue_room * 2 : 64;
        struct queued *bigger = realloc(tap.queue, room * sizeof *bigger);

        if (!bigger)
            return false;
        tap.queue = bigger;
        tap.queue_room = room;
    }
    tap.queue[tap.queue_count++] =
        (struct queued){.arrival = arrival, .suspect = suspect, .len = len, .data = data};
    return true;
}

static int by_arrival(const void *left, const void *right)
{
    uint64_t a = ((const struct queued *)left)->arrival, b = ((const struct queued *)right)->arrival;

    return (a > b) - (a < b);
}

void queue_start(void)
{
    if (tap.queue_count)
        qsort(tap.queue, tap.queue_count, sizeof *tap.queue, by_arrival);
    tap.isolation_until = tap_now() + ISOLATION_TIME;
    watch_device(!tap.queue_count);
    wake();
}

static void end_queue(void)
{
    free(tap.queue);
    tap.queue = NULL;
    tap.queue_head = tap.queue_count = tap.queue_room = 0;
    watch_device(!tap.paused);
}

/* A request that was taken is to be read again, by Python this time. Takes ownership of data; without
 * memory the request stays unanswered until there is another daemon. Lock held. */
void queue_give_back(char *data, size_t len)
{
    struct in_header header;
    struct write_in in;
    uint64_t ignored;

    memcpy(&header, data, sizeof header);
    memcpy(&in, data + sizeof header, sizeof in);
    map_take(&tap.budgets, in.fh, &ignored);
    if (!queue_add(header.unique, false, data, len))
        return;
    watch_device(false);
    wake();
}

/* A paused tap must still notice that the mount has ended. */
static ssize_t nothing(void)
{
    struct pollfd device = {.fd = tap.device};

    errno = poll(&device, 1, 0) == 1 && (device.revents & (POLLERR | POLLHUP)) ? ENODEV : EINTR;
    return -1;
}

static ssize_t take(char *buffer, size_t size, uint64_t *too_long)
{
    struct queued item;
    struct in_header header;
    int64_t now = tap_now();

    if (tap.paused || tap.queue_head == tap.queue_count || suspect_running(now))
        return nothing();
    item = tap.queue[tap.queue_head++];
    memcpy(&header, item.data, sizeof header);
    if (item.len <= size)
        memcpy(buffer, item.data, item.len);
    else
        *too_long = header.unique;
    free(item.data);
    tap.suspect = item.suspect ? key_of(header.unique) : 0;
    tap.suspect_until = now + SUSPECT_TIME;
    if (tap.queue_head == tap.queue_count)
        end_queue();
    wake();
    return (ssize_t)item.len;
}

ssize_t queue_take(char *buffer, size_t size)
{
    uint64_t too_long = 0;
    ssize_t len;
    int error;

    TAP_LOCK();
    len = take(buffer, size, &too_long);
    error = errno;
    TAP_UNLOCK();
    if (too_long) { /* libfuse's buffer shrank: cannot happen while the negotiations agree */
        tap_answer(too_long, EIO);
        len = -1;
        error = EINTR;
    }
    errno = error;
    return len;
}

void queue_answered(uint64_t unique)
{
    if (unique != tap.suspect)
        return;
    tap.suspect = 0;
    if (tap.queue_head < tap.queue_count)
        wake();
}

/* Called with the lock held. */
void tap_pause(bool paused)
{
    tap.paused = paused;
    if (!tap.mounted)
        return;
    watch_device(!paused && tap.queue_head == tap.queue_count);
    wake();
}
