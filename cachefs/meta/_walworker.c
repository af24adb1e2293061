/* The thread that brings what is pending to the log, and the life of a log. */
#include "_walring.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LONGEST_WRITE (1 << 20)
#define RETRY 500000000 /* ns */

/* -- the worker --------------------------------------------------------------------------------- */

static void advance(struct log *log, struct entry *entry, uint64_t count)
{
    struct head *head = log->head;

    if (entry->offset == 0 && head->done == entry->pos && count >= WAL_HEADER)
        memcpy(head->base, log->data + entry->pos % log->size, WAL_HEADER);
    STORE(head->done, head->done + count);
}

/* One system call; the lock is not held meanwhile. */
static ssize_t carry_out(struct log *log, struct entry *entry)
{
    uint64_t done = log->head->done, end = entry->pos + entry->len;
    off_t at = (off_t)(entry->offset + (done - entry->pos));
    ssize_t count;

    log->writing = true;
    pthread_mutex_unlock(&log->lock);
    if (entry->kind == SYNC) {
        count = -ring_sync_header(log);
    } else {
        count = pwrite(log->fd, log->data + done % log->size, least(end - done, LONGEST_WRITE), at);
        if (count < 0)
            count = -errno;
    }
    pthread_mutex_lock(&log->lock);
    log->writing = false;
    return count;
}

static void step(struct log *log)
{
    struct entry *entry = entry_at(log, log->head->first);
    ssize_t count;

    if (log->head->done < entry->pos)
        STORE(log->head->done, entry->pos);
    count = carry_out(log, entry);
    if (count < 0 || (count == 0 && entry->kind == DATA)) {
        log->error = count < 0 ? (int)-count : ENOSPC;
    } else {
        log->error = 0;
        advance(log, entry, (uint64_t)count);
        if (log->head->done >= entry->pos + entry->len)
            STORE(log->head->first, log->head->first + 1);
    }
    pthread_mutex_unlock(&log->lock); /* whoever is woken wants it at once */
    pthread_cond_broadcast(&log->progress);
    pthread_mutex_lock(&log->lock);
}

static void caught_up(struct log *log)
{
    log->behind = false;
    log->since = 0;
    if (log->allocated > ALLOCATED_ALWAYS && !log->gathered.len) {
        fallocate(log->ring, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  RING_HEAD + ALLOCATED_ALWAYS, (off_t)(log->size - ALLOCATED_ALWAYS));
        log->allocated = ALLOCATED_ALWAYS;
    }
}

static void *work(void *given)
{
    struct log *log = given;

    pthread_mutex_lock(&log->lock);
    while (!log->stop) {
        if (nothing_published(log)) {
            caught_up(log);
            pthread_cond_wait(&log->work, &log->lock);
        } else if (log->renewing) {
            pthread_cond_wait(&log->work, &log->lock);
        } else if (log->error) {
            int64_t when = ring_now() + RETRY;
            while (log->error && !log->stop && ring_now() < when)
                wait_until(&log->work, log, when);
            log->error = 0; /* none is told of a write that is under way: see drop */
        } else {
            step(log);
        }
    }
    pthread_mutex_unlock(&log->lock);
    return NULL;
}

/* -- life --------------------------------------------------------------------------------------- */

/* Nothing is pending: the header that the file has now is what comes next builds on. */
void ring_refresh(struct log *log)
{
    unsigned char header[WAL_HEADER] = {0};

    if (pread(log->fd, header, sizeof header, 0) != sizeof header)
        memset(header, 0, sizeof header);
    memcpy(log->head->base, header, sizeof header);
}

static bool start(struct log *log)
{
    sigset_t all, before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the main thread's */
    log->running = pthread_create(&log->worker, NULL, work, log) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return log->running;
}

/* SQLite has opened the log. False: it cannot be served. */
bool ring_used(struct log *log)
{
    bool served = true;

    pthread_mutex_lock(&log->lock);
    if (!log->users && nothing_pending(log)) {
        if (log->fd >= 0)
            close(log->fd);
        log->fd = open(log->path, O_RDWR | O_CLOEXEC);
        served = log->fd >= 0 && (log->running || start(log));
        if (served)
            ring_refresh(log);
    }
    log->users += served;
    pthread_mutex_unlock(&log->lock);
    return served;
}

void ring_unused(struct log *log)
{
    pthread_mutex_lock(&log->lock);
    log->users--;
    ring_publish(log);
    pthread_mutex_unlock(&log->lock);
}

static bool map(struct log *log)
{
    int both = PROT_READ | PROT_WRITE;
    unsigned char *at = mmap(NULL, RING_HEAD + 2 * log->size, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (at == MAP_FAILED)
        return false;
    log->head = (struct head *)at;
    log->table = (struct entry *)(at + RING_TABLE);
    log->data = at + RING_HEAD;
    return mmap(at, RING_HEAD + log->size, both, MAP_SHARED | MAP_FIXED, log->ring, 0) != MAP_FAILED
           && mmap(log->data + log->size, log->size, both, MAP_SHARED | MAP_FIXED, log->ring,
                   RING_HEAD) != MAP_FAILED;
}

static void init_locks(struct log *log)
{
    pthread_condattr_t clock;

    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&log->lock, NULL);
    pthread_mutex_init(&log->syncing, NULL);
    pthread_cond_init(&log->work, &clock);
    pthread_cond_init(&log->progress, &clock);
    pthread_condattr_destroy(&clock);
}

/* `fd`: the ring's file, with nothing pending in it; it belongs to the log from now on, unless
 * NULL is returned, with errno. */
struct log *ring_new(const char *path, const char *index, int fd, int64_t patience)
{
    struct log *log = calloc(1, sizeof *log);
    off_t size = lseek(fd, 0, SEEK_END);

    if (!log || size <= RING_HEAD + ALLOCATED_ALWAYS || (size - RING_HEAD) % 4096) {
        free(log);
        errno = EINVAL;
        return NULL;
    }
    *log = (struct log){.fd = -1, .ring = fd, .patience = patience, .commit_at = -1,
                        .size = (uint64_t)size - RING_HEAD, .allocated = ALLOCATED_ALWAYS};
    log->path = strdup(path);
    log->index = strdup(index);
    init_locks(log);
    if (!log->path || !log->index || fallocate(fd, 0, 0, RING_HEAD + ALLOCATED_ALWAYS) || !map(log)) {
        log->ring = -1;
        ring_free(log);
        return NULL;
    }
    log->fill = log->head->done;
    ring_rewind(log);
    return log;
}

/* Waits for a write that is under way. What is pending stays in the ring. */
void ring_free(struct log *log)
{
    pthread_mutex_lock(&log->lock);
    log->stop = true;
    pthread_cond_signal(&log->work);
    pthread_mutex_unlock(&log->lock);
    if (log->running)
        pthread_join(log->worker, NULL);
    if (log->head)
        munmap(log->head, RING_HEAD + 2 * log->size);
    if (log->fd >= 0)
        close(log->fd);
    if (log->ring >= 0)
        close(log->ring);
    pthread_cond_destroy(&log->work);
    pthread_cond_destroy(&log->progress);
    pthread_mutex_destroy(&log->lock);
    pthread_mutex_destroy(&log->syncing);
    free(log->path);
    free(log->index);
    free(log);
}
