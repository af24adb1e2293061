/* Reading requests from the device: what `tap_admit` leaves for libfuse. */
#include "_tap.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define NEXT_CALL_NS 50000
#define TURN_NS 5000000

/* A kill while the kernel copies a request into pages that do not exist yet fails the caller's
 * system call with EIO instead of leaving the request to be sent again; so let them exist. */
static void populate(char *buffer, size_t size)
{
    for (size_t i = 0; i < size; i += PAGE) {
        volatile char *byte = buffer + i;
        *byte = *byte;
    }
}

/* Requests are read here and copied to whoever asked. Each task of pyfuse3 has a buffer of its own for
 * the longest request there can be; of one that got short ones only, the rest never takes memory. */
static struct {
    char *now, *spare[WRITES_AT_ONCE]; /* lock held: others give them back */
    size_t room, spares;
    bool alike; /* all that there are have this size */
} buffers;

static char *own_buffer(size_t size)
{
    TAP_LOCK();
    if (buffers.room < size) {
        free(buffers.now);
        buffers.now = NULL;
        while (buffers.spares)
            free(buffers.spare[--buffers.spares]);
        buffers.alike = !buffers.room;
        buffers.room = size;
    }
    if (!buffers.now && buffers.spares)
        buffers.now = buffers.spare[--buffers.spares];
    TAP_UNLOCK();
    if (!buffers.now && (buffers.now = malloc(size)))
        populate(buffers.now, size);
    return buffers.now;
}

/* What is in the buffer is somebody else's from now on. Lock held. */
void buffer_take(const char *buffer)
{
    if (buffers.now == buffer)
        buffers.now = NULL;
}

void buffer_give_back(char *buffer)
{
    TAP_LOCK();
    if (buffers.alike && buffers.spares < WRITES_AT_ONCE) {
        buffers.spare[buffers.spares++] = buffer;
        buffer = NULL;
    }
    TAP_UNLOCK();
    free(buffer);
}

/* Whether there is a request to read within so many nanoseconds. */
bool tap_more_waits(int64_t nanoseconds)
{
    struct pollfd device = {.fd = tap.device, .events = POLLIN};
    struct timespec moment = {.tv_sec = nanoseconds / 1000000000,
                              .tv_nsec = nanoseconds % 1000000000};

    return ppoll(&device, 1, &moment, NULL) > 0;
}

/* Whoever was answered here goes on with the next call in a moment. To wait for that costs less than
 * to go through Python's scheduler for nothing. */
static bool more_will_follow(void)
{
    bool answered = tap.answered;

    tap.answered = false;
    return answered && tap_more_waits(NEXT_CALL_NS);
}

static ssize_t read_device(char *target, char *buffer, size_t size)
{
    ssize_t len;
    int64_t until = tap_now() + TURN_NS;

    do {
        while ((len = read(tap.device, buffer, size)) >= (ssize_t)sizeof(struct in_header)) {
            size_t admitted = (size_t)len;

            if (tap_admit(buffer, &admitted)) {
                memcpy(target, buffer, admitted);
                return (ssize_t)admitted;
            }
            buffer = own_buffer(size);
            if (tap_now() > until || !buffer) { /* Python has other things to do, too */
                errno = EINTR;
                return -1;
            }
        }
    } while (len < 0 && errno == EAGAIN && more_will_follow());
    if (len >= 0) /* never seen: the kernel's messages are at least a header long */
        errno = EIO;
    else if (errno == EAGAIN)
        errno = EINTR; /* pyfuse3 takes EINTR for "nothing there, go on", EAGAIN for a failure */
    else if (errno == ECONNABORTED)
        errno = ENODEV;
    return -1;
}

ssize_t tap_read(int fd, void *buffer, size_t size, void *userdata)
{
    char *own = own_buffer(size);
    ssize_t len;
    size_t admitted;

    (void)fd, (void)userdata;
    if (!own) {
        errno = EINTR; /* once more, then */
        return -1;
    }
    if (!queue_in_use())
        return read_device(buffer, own, size);
    len = queue_take(own, size);
    if (len < 0)
        return -1;
    admitted = (size_t)len;
    if (tap_admit(own, &admitted)) {
        memcpy(buffer, own, admitted);
        return (ssize_t)admitted;
    }
    errno = EINTR;
    return -1;
}
