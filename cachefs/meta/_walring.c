/* Commits on their way to the write-ahead log.
 *
 * What SQLite writes to the log is gathered in a ring in memory until a transaction is complete,
 * then published, and written to the file by a thread of ours with one pwrite. The commit waits
 * for that, as long as `patience` allows: then everything is as if it had written itself, errors
 * too. A disk that takes longer is not waited for: the commit counts (its bytes are in a file of a
 * tmpfs, which outlives this process), and until the disk has caught up no other commit waits.
 *
 * Where processors are scarce it is the worker that comes too late, at each of some commits: so
 * after one that took SLOW_PART of the patience nobody waits for a while, unless there was an error.
 *
 * Rules
 * - What is before `acked` has been acknowledged: it is kept and tried again whatever happens.
 *   What comes after is part of the transaction that is going on, and is dropped when it fails.
 * - Published is what `first` and `last` and the lengths of the entries say. Bytes come before the
 *   length that covers them, entries before `last`: whoever reads the ring after this process was
 *   killed finds nothing that is half written. `done` grows before its room is used again.
 * - Entries are written in order; doing one again changes nothing.
 * - One connection writes (SQLite sees to that); any thread reads and drains.
 * - The worker sleeps for RETRY after an error, or until somebody is there to be told.
 */
#include "_walring.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#define SLOW_PART 20
#define HURRY 1000000000 /* ns */
#define GATHERED_MOST (1 << 20)
#define ALLOCATED_MORE (2 << 20)


int64_t ring_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* -- publishing: called with the lock held ------------------------------------------------------ */

static bool extends(struct log *log, const struct entry *more)
{
    struct entry *last = entry_at(log, log->head->last - 1);

    return !nothing_published(log) && last->kind == DATA && more->kind == DATA
           && last->offset + last->len == more->offset && last->pos + last->len == more->pos;
}

static void put(struct log *log, const struct entry *more)
{
    if (nothing_published(log))
        log->since = ring_now();
    if (extends(log, more)) {
        struct entry *last = entry_at(log, log->head->last - 1);
        STORE(last->len, last->len + more->len);
    } else {
        *entry_at(log, log->head->last) = *more;
        STORE(log->head->last, log->head->last + 1);
    }
    pthread_cond_signal(&log->work);
}

void ring_publish(struct log *log)
{
    if (log->gathered.len)
        put(log, &log->gathered);
    log->gathered.len = 0;
}

/* The transaction that is going on comes to nothing. No write is under way, as there is an error. */
static void drop(struct log *log)
{
    struct head *head = log->head;

    log->gathered.len = 0;
    log->commit_at = -1;
    while (!nothing_published(log) && entry_at(log, head->last - 1)->pos >= log->acked)
        STORE(head->last, head->last - 1);
    if (!nothing_published(log)) {
        struct entry *last = entry_at(log, head->last - 1);
        if (last->pos + last->len > log->acked)
            STORE(last->len, log->acked - last->pos);
    }
    if (head->done >= log->acked)
        STORE(head->last, head->first);
    log->fill = log->acked = head->done > log->acked ? head->done : log->acked;
    if (nothing_published(log))
        log->error = 0, log->since = 0;
}

static int failed(struct log *log)
{
    int error = log->error;

    drop(log);
    return error;
}

/* Positions start at the front again, so that in good times the same few pages are used. */
void ring_rewind(struct log *log)
{
    uint64_t start = (log->fill + log->size - 1) / log->size * log->size;

    STORE(log->head->done, start);
    log->fill = log->acked = start;
}

static bool has_place(struct log *log, uint64_t count)
{
    uint64_t from = log->fill % log->size, to = least(from + count, log->size);

    if (log->fill + count - log->head->done > log->size
        || log->head->last - log->head->first > RING_ENTRIES - 8)
        return false;
    while (to > log->allocated) {
        uint64_t more = least(ALLOCATED_MORE, log->size - log->allocated);
        if (fallocate(log->ring, 0, (off_t)(RING_HEAD + log->allocated), (off_t)more))
            return false;
        log->allocated += more;
    }
    return from + count <= log->size || log->allocated == log->size;
}

static void ask_again(struct log *log)
{
    log->error = 0;
    pthread_cond_signal(&log->work);
}

/* The last resort: waits for the disk. Callers look at the room before they begin. */
static int make_place(struct log *log, uint64_t count)
{
    if (nothing_pending(log) && log->fill % log->size)
        ring_rewind(log);
    if (has_place(log, count))
        return 0;
    ring_publish(log);
    if (log->error)
        ask_again(log);
    while (!has_place(log, count)) {
        if (log->error)
            return failed(log);
        if (nothing_pending(log)) {
            if (!(log->fill % log->size))
                return ENOSPC; /* more than ever fits */
            ring_rewind(log);
            continue;
        }
        pthread_cond_wait(&log->progress, &log->lock);
    }
    return 0;
}

/* The transaction is complete: it counts once this returns 0. */
static int commit(struct log *log)
{
    int64_t began = ring_now(), deadline = began + log->patience;
    bool waits = (!log->behind && began >= log->hurried_until) || log->error;

    ring_publish(log);
    if (log->error)
        ask_again(log);
    while (waits && !nothing_published(log)) {
        if (log->error)
            return failed(log);
        if (ring_now() >= deadline) {
            log->behind = true;
            break;
        }
        wait_until(&log->progress, log, deadline);
    }
    if (waits && ring_now() - began > log->patience / SLOW_PART)
        log->hurried_until = ring_now() + HURRY;
    log->acked = log->fill;
    return 0;
}

/* Whether what was just written completes a transaction: the page of the frame whose header tells
 * the size of the database, or that header when its checksum is put right afterwards. */
static bool completes(struct log *log, const unsigned char *bytes, uint64_t count, int64_t at)
{
    bool last = count == FRAME_HEADER && (bytes[4] || bytes[5] || bytes[6] || bytes[7]);

    if (log->commit_at >= 0 && count != FRAME_HEADER && at == log->commit_at + FRAME_HEADER)
        return log->complete = true;
    if (last && log->complete && at == log->commit_at)
        return true;
    if (last)
        log->commit_at = at, log->complete = false;
    return false;
}

static void gather(struct log *log, const void *bytes, uint64_t count, int64_t at)
{
    struct entry *more = &log->gathered;

    if (more->len && more->offset + more->len != (uint64_t)at)
        ring_publish(log);
    if (!more->len)
        *more = (struct entry){(uint64_t)at, log->fill, 0, DATA};
    memcpy(log->data + log->fill % log->size, bytes, count);
    more->len += count;
    log->fill += count;
}

/* Returns an errno: nothing of the transaction is kept then. */
int ring_write(struct log *log, const void *bytes, uint64_t count, int64_t at)
{
    int error;

    pthread_mutex_lock(&log->lock);
    if (at == 0)
        log->commit_at = -1;
    error = make_place(log, count);
    if (!error) {
        gather(log, bytes, count, at);
        if (completes(log, bytes, count, at))
            error = commit(log);
        else if (log->gathered.len > GATHERED_MOST)
            ring_publish(log);
    }
    pthread_mutex_unlock(&log->lock);
    return error;
}

/* What was written before has to be on the disk before what is written from now on. */
void ring_barrier(struct log *log)
{
    pthread_mutex_lock(&log->lock);
    ring_publish(log);
    put(log, &(struct entry){0, log->fill, 0, SYNC});
    pthread_mutex_unlock(&log->lock);
}

/* -- reading ------------------------------------------------------------------------------------ */

uint64_t ring_progress(struct log *log)
{
    return LOAD(log->head->done) + LOAD(log->renewals);
}

bool ring_empty(struct log *log)
{
    bool empty;

    pthread_mutex_lock(&log->lock);
    empty = nothing_pending(log);
    pthread_mutex_unlock(&log->lock);
    return empty;
}

/* Whether the range is wholly in it. */
static bool overlay_one(struct log *log, const struct entry *entry, unsigned char *to,
                        uint64_t count, uint64_t at)
{
    uint64_t skip = log->head->done > entry->pos ? log->head->done - entry->pos : 0;
    uint64_t from = entry->offset + skip, until = entry->offset + entry->len;
    uint64_t start = from > at ? from : at, end = least(until, at + count);

    if (entry->kind != DATA || skip >= entry->len || start >= end)
        return false;
    memcpy(to + (start - at), log->data + (entry->pos + (start - entry->offset)) % log->size,
           end - start);
    return start == at && end == at + count;
}

/* Put what is pending over bytes that were read from the file. The answer is whether one entry had
 * the whole range, so that nothing of the file is needed. */
bool ring_overlay(struct log *log, unsigned char *to, uint64_t count, int64_t at)
{
    bool whole = false;
    uint64_t number;

    pthread_mutex_lock(&log->lock);
    for (number = log->head->first; number < log->head->last; number++)
        whole |= overlay_one(log, entry_at(log, number), to, count, (uint64_t)at);
    if (log->gathered.len)
        whole |= overlay_one(log, &log->gathered, to, count, (uint64_t)at);
    pthread_mutex_unlock(&log->lock);
    return whole;
}

/* Where the log will end; 0: not further than now. */
int64_t ring_end(struct log *log)
{
    uint64_t end = 0, number;

    pthread_mutex_lock(&log->lock);
    for (number = log->head->first; number < log->head->last; number++) {
        struct entry *entry = entry_at(log, number);
        if (entry->kind == DATA && entry->offset + entry->len > end)
            end = entry->offset + entry->len;
    }
    if (log->gathered.len && log->gathered.offset + log->gathered.len > end)
        end = log->gathered.offset + log->gathered.len;
    pthread_mutex_unlock(&log->lock);
    return (int64_t)end;
}

void ring_state(struct log *log, uint64_t *pending, int64_t *age, int *error)
{
    pthread_mutex_lock(&log->lock);
    *pending = nothing_pending(log) ? 0 : log->fill - log->head->done;
    *age = log->since ? ring_now() - log->since : 0;
    *error = log->error;
    pthread_mutex_unlock(&log->lock);
}

/* -- draining ----------------------------------------------------------------------------------- */

static uint64_t barriers_end(struct log *log)
{
    uint64_t number = log->head->last;

    while (number > log->head->first && entry_at(log, number - 1)->kind != SYNC)
        number--;
    return number;
}

/* Returns once the file has all that was written before the call, or the errno of the write that
 * failed. */
int ring_drain(struct log *log)
{
    int error = 0;
    uint64_t until, barriers;

    pthread_mutex_lock(&log->lock);
    ring_publish(log);
    until = log->fill;
    barriers = barriers_end(log);
    if (log->error)
        ask_again(log);
    while (!error && !nothing_published(log)
           && (log->head->done < until || log->head->first < barriers)) {
        error = log->error;
        if (!error)
            pthread_cond_wait(&log->progress, &log->lock);
    }
    pthread_mutex_unlock(&log->lock);
    return error;
}
