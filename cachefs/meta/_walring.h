/* Commits on their way to the write-ahead log: kept in memory that outlives the process, written
 * to the file by a thread. See _walring.c for the rules, _walsync.c for those about the disk. */
#ifndef CACHEFS_WALRING_H
#define CACHEFS_WALRING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#define RING_HEAD 8192     /* bytes before the data */
#define RING_TABLE 512     /* where the entries begin */
#define RING_ENTRIES 240
#define WAL_HEADER 32
#define FRAME_HEADER 24
#define ALLOCATED_ALWAYS (1 << 20)

#define LOAD(what) __atomic_load_n(&(what), __ATOMIC_ACQUIRE)
#define STORE(what, value) __atomic_store_n(&(what), (value), __ATOMIC_RELEASE)

enum kind { DATA = 0, SYNC = 1 };

/* In the shared file, as cachefs.meta.ring has it. */
struct entry {
    uint64_t offset; /* in the log */
    uint64_t pos;    /* of its bytes; these positions only grow, the place is `pos % size` */
    uint64_t len;
    uint64_t kind;   /* SYNC: what comes before has to be on the disk before what comes after */
};

struct head {
    char magic[8];
    uint64_t size; /* of the data */
    unsigned char id[16];
    uint64_t directory;   /* inode number of the database's directory */
    uint64_t first, last; /* entries that are pending */
    uint64_t done;        /* what lies before that position is in the log */
    unsigned char base[WAL_HEADER]; /* the header that the log had before what is pending */
};

/* One log and what it lacks. `lock` guards all of it; the worker gives it up for its system calls. */
struct log {
    struct log *next;
    char *path;
    char *index; /* of its index, in memory */
    int fd; /* the worker's own; -1: nobody has the log open yet */
    int users;
    int64_t patience; /* nanoseconds */

    struct head *head;
    struct entry *table;
    unsigned char *data; /* mapped twice in a row, so that nothing ever wraps */
    int ring;
    uint64_t size, allocated;

    pthread_mutex_t lock;
    pthread_cond_t work, progress;
    pthread_t worker;
    bool running, stop, behind;
    bool writing;  /* the worker is in a system call */
    bool renewing;             /* what the file has is written once more: the worker waits */
    const unsigned char *copy; /* of that, meanwhile; the file is not to be read there. Else NULL */
    uint64_t copied;           /* bytes of it */
    uint64_t renewals;         /* how many began */

    pthread_mutex_t syncing;    /* guards what follows; held for each sync of the file */
    uint64_t failures, trusted; /* syncs that failed; up to which one all was written anew */
    int error; /* errno of the last write, if that failed and none is under way since */

    struct entry gathered; /* not published yet */
    uint64_t fill;         /* where the next byte goes */
    uint64_t acked;        /* what lies before was acknowledged, and may not be dropped */
    int64_t hurried_until; /* commits do not wait before */
    int64_t since;         /* when something began to be pending; 0: nothing is */
    int64_t commit_at;     /* of the frame that ends the transaction; -1: not seen */
    bool complete;         /* its page was written too */
};

static inline void wait_until(pthread_cond_t *cond, struct log *log, int64_t when)
{
    struct timespec at = {.tv_sec = when / 1000000000, .tv_nsec = when % 1000000000};

    pthread_cond_timedwait(cond, &log->lock, &at);
}

static inline struct entry *entry_at(struct log *log, uint64_t number)
{
    return &log->table[number % RING_ENTRIES];
}

static inline bool nothing_published(struct log *log)
{
    return log->head->first == log->head->last;
}

static inline bool nothing_pending(struct log *log)
{
    return nothing_published(log) && !log->gathered.len;
}

static inline uint64_t least(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

struct log *ring_new(const char *path, const char *index, int fd, int64_t patience);
void ring_free(struct log *log);
bool ring_used(struct log *log);
void ring_unused(struct log *log);
int ring_write(struct log *log, const void *bytes, uint64_t count, int64_t at);
void ring_barrier(struct log *log);
int ring_drain(struct log *log);
int ring_sync_header(struct log *log);
int ring_sync(struct log *log);
int ring_renew(struct log *log, const unsigned char *bytes, uint64_t count);
bool ring_copied(struct log *log, unsigned char *to, uint64_t count, int64_t at);
uint64_t ring_doubt(struct log *log);
void ring_trust(struct log *log, uint64_t failures);
void ring_refresh(struct log *log);
bool ring_overlay(struct log *log, unsigned char *to, uint64_t count, int64_t at);
int64_t ring_end(struct log *log);
uint64_t ring_progress(struct log *log);
bool ring_empty(struct log *log);
void ring_state(struct log *log, uint64_t *pending, int64_t *age, int *error);
int64_t ring_now(void);
void ring_publish(struct log *log);
void ring_rewind(struct log *log);

#endif
