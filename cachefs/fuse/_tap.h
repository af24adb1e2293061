/* Shared declarations of the tap. See the head of _tap.c for what it does and for the state layout. */
#ifndef CACHEFS_TAP_H
#define CACHEFS_TAP_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* The shared object is loaded RTLD_GLOBAL: only what is marked TAP_EXPORT may be seen from outside. */
#pragma GCC visibility push(hidden)
#define TAP_EXPORT __attribute__((visibility("default")))

/* ---- FUSE protocol, the parts the tap reads and writes (stable kernel ABI, linux/fuse.h) ---- */

enum {
    OP_LOOKUP = 1, OP_FORGET = 2, OP_GETATTR = 3, OP_SETATTR = 4, OP_READLINK = 5, OP_RMDIR = 11,
    OP_RENAME = 12, OP_OPEN = 14, OP_READ = 15, OP_WRITE = 16, OP_STATFS = 17, OP_RELEASE = 18,
    OP_FSYNC = 20, OP_GETXATTR = 22, OP_LISTXATTR = 23, OP_FLUSH = 25, OP_INIT = 26,
    OP_OPENDIR = 27, OP_READDIR = 28, OP_RELEASEDIR = 29, OP_FSYNCDIR = 30, OP_ACCESS = 34,
    OP_CREATE = 35, OP_INTERRUPT = 36, OP_NOTIFY_REPLY = 41, OP_BATCH_FORGET = 42,
    OP_FALLOCATE = 43, OP_READDIRPLUS = 44, OP_RENAME2 = 45, OP_MAX = 64,
};

#define READAHEAD (1u << 20) /* bytes; the kernel has its own idea of it, and takes the smaller one */
#define INIT_WRITEBACK_CACHE (1u << 16)
#define INIT_PARALLEL_DIROPS (1u << 18)
#define INIT_HANDLE_KILLPRIV_V2 (1u << 28)
#define INIT_EXT (1u << 30)
#define INIT2_DIRECT_IO_ALLOW_MMAP (1u << 4)
#define INIT2_PASSTHROUGH (1u << 5)
#define INIT2_HAS_RESEND (1u << 7)

#define OPEN_PASSTHROUGH (1u << 7)
#define OPEN_NOFLUSH (1u << 5)
#define OPEN_KEEP_CACHE (1u << 1)
#define OPEN_CACHE_DIR (1u << 3)

#define NOTIFY_RESEND 7
#define UNIQUE_RESEND (1ull << 63)

struct in_header {
    uint32_t len, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid;
    uint16_t total_extlen, padding;
};

struct out_header {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};

struct init_in {
    uint32_t major, minor, max_readahead, flags, flags2;
};

struct init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth;
    uint32_t unused[6];
};

struct open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

struct fallocate_in {
    uint64_t fh, offset, length;
    uint32_t mode, padding;
};

struct read_in {
    uint64_t fh, offset;
    uint32_t size, read_flags;
    uint64_t lock_owner;
    uint32_t flags, padding;
};

struct write_in {
    uint64_t fh, offset;
    uint32_t size, write_flags;
    uint64_t lock_owner;
    uint32_t flags, padding;
};

struct write_out {
    uint32_t size, padding;
};

#define WRITE_KILL_SUIDGID (1u << 2)
#define SETATTR_ATIME_NOW (1u << 7)
#define SETATTR_MTIME_NOW (1u << 8)

#define ENTRY_OUT_SIZE 128 /* struct fuse_entry_out, comes before open_out in a CREATE reply */
#define MIN_READ_BUFFER 8192

/* ---- State that outlives the daemon (layout at the head of _tap.c) ---- */

#define TAP_MAGIC 0x31544643u /* "CFT1" */
#define TAP_VERSION 1u
#define TAP_STATE_SIZE (4u << 20)
#define FLAG_TAKEOVER_POSSIBLE 1u

struct tap_header {
    uint32_t magic, version, flags, epoch;
    uint64_t takeovers;
    uint32_t death, init_state;
    uint64_t arrivals;
    int32_t last_backing_id;
    uint32_t inflight_slots, handle_slots, backing_slots;
    uint32_t init_request_len, init_raw_len, init_reply_len, padding;
    uint8_t reserved[56];
    uint8_t init_request[256], init_raw[64], init_reply[64];
};

enum { SLOT_EMPTY = 0, SLOT_DEAD = 1, SLOT_PENDING = 2, SLOT_LIVE = 3 };
#define SLOT_STATE 0xffu
#define HANDLE_PASSTHROUGH 0x100u
#define HANDLE_DIR 0x200u

/* Every slot starts with its state word and has its key at offset 8. */
struct slot {
    uint32_t state, word;
    uint64_t key;
};

struct inflight {
    uint32_t state, opcode;
    uint64_t unique, nodeid, fh, arrival;
    uint32_t charge, open_flags;
    uint64_t reserved[2];
};

#define CHARGE_DISPATCHED 0x80000000u
#define CHARGE_LIMIT 10u /* two crashes at 5, or five kills from outside at 2 */

struct handle {
    uint32_t state, open_flags;
    uint64_t fh, nodeid, unique;
};

struct backing {
    uint32_t state;
    int32_t id;
    uint64_t inode;
    uint32_t count, padding;
    uint64_t dev, ino;
};

struct table {
    char *base;
    uint32_t slots, slot_size, used;
};

struct tap_state {
    struct tap_header *header;
    size_t size;
    struct table inflight, handles, backing;
};

/* Maps fd (or anonymous memory when fd < 0). 0, or -1 with `why` filled in. */
int state_attach(struct tap_state *state, int fd, char *why, size_t why_size);
void state_detach(struct tap_state *state);

/* Slots with `key`, one after another: start with *position = 0; NULL when there are no more. */
void *table_next(const struct table *table, uint64_t key, uint32_t *position);
/* Every used slot: start with *position = 0. */
void *table_each(const struct table *table, uint32_t *position);
/* A free slot for key, NULL when the table is seven eighths full. Fill it, then table_publish it. */
void *table_claim(struct table *table, uint64_t key);
void table_publish(struct table *table, void *slot, uint32_t state);
void table_drop(struct table *table, void *slot);

struct inflight *inflight_find(const struct tap_state *state, uint64_t unique);
struct backing *backing_find(const struct tap_state *state, uint64_t inode);
struct handle *handle_find(const struct tap_state *state, uint64_t fh, bool dir);

/* ---- A map within the process: u64 -> u64 ---- */

struct map {
    uint64_t *keys, *values;
    uint8_t *used;
    size_t slots, count;
};

bool map_put(struct map *map, uint64_t key, uint64_t value);
bool map_get(const struct map *map, uint64_t key, uint64_t *value);
bool map_take(struct map *map, uint64_t key, uint64_t *value);
void map_clear(struct map *map);

/* ---- The tap itself ---- */

enum { EVENT_FALLOCATE = 0, EVENT_ABANDONED = 1, EVENT_FLUSHED = 2, EVENT_WRITTEN = 3 };

struct event {
    uint32_t kind, mode;
    uint64_t fh, offset, length;
};

struct queued { /* a request read ahead of its dispatch, at takeover only */
    uint64_t arrival;
    bool suspect;
    size_t len;
    char *data;
};

struct poisoned {
    uint64_t unique, nodeid;
    uint32_t opcode;
    size_t len;
    char *body; /* what followed the request header, at most POISON_BODY bytes */
};
#define POISON_BODY 8192

struct job { /* one FALLOCATE for a worker */
    struct job *next;
    uint64_t unique, ino;
    struct fallocate_in in;
};

struct tap {
    pthread_mutex_t lock; /* guards all below and the tables; never held over a blocking call */
    struct tap_state state;
    bool hooked; /* libfuse got no functions of ours, its calls are redirected */
    bool configured, mounted, taken_over, takeover_wanted, want_passthrough, paused, replaying;
    uint32_t stack_depth;
    int device, poll, timer; /* /dev/fuse; what pyfuse3 waits on: device and timer together */
    uint64_t init_unique, arrivals_before;
    bool rehearsal; /* of a takeover: nothing is asked of the kernel */
    bool brief;    /* answer FLUSH and swallow FORGET here */
    bool answered; /* ... which was done with the request that was read last */
    uint64_t current;      /* key of the request that libfuse got last */
    uint32_t current_pid;  /* ... whose it is */
    bool kills_privileges; /* ... which is to clear suid and sgid */
    uint32_t times_of_now; /* ... which is to set these times to now */
    struct init_out replay; /* libfuse's answer to the replayed INIT */
    int32_t replay_error;
    size_t replay_len;
    char why[256];
    int (*real_mount)(void *, const char *);
    int (*session_fd)(void *);
    int (*io_314)(void *, const void *, int);
    int (*io_317)(void *, const void *, size_t, int);
    void (*process_buf)(void *, const void *);
    void (*without_python)(bool); /* let others have it while this thread waits; NULL: there is none */

    struct map passthrough, files; /* fh -> backing id, fh -> fd */
    struct map closings;           /* fh -> where its closing is noted (_tap_brief.c) */
    struct map listings;           /* fh of a directory -> open flags */
    struct map budgets;            /* fh -> bytes that are written here; as below: in memory? */
    struct map readers;            /* fh -> fd that is read here; lowest bit: it is in memory */
    uint64_t read_bytes;           /* ... since Python asked last */
    struct map held;               /* nodeids of files whose FALLOCATEs are to wait */
    struct map interrupted;        /* requests whose callers do not want to wait any more */
    struct map waiting;            /* requests with Python that may see or change names */
    struct map watched, unbacked;  /* nodeid -> counters, nodeid -> handles without their id */
    uint64_t counts[OP_MAX], unrecorded;
    struct event *events;
    size_t event_count, event_room;
    struct queued *queue;
    size_t queue_head, queue_count, queue_room;
    uint64_t suspect; /* unique of the suspect that was given out last, 0 when answered */
    int64_t suspect_until, isolation_until;
    struct poisoned *poisoned;
    size_t poisoned_count;

    struct job *jobs, *jobs_tail, *parked; /* parked: asked the filesystem for their file */
    pthread_cond_t jobs_ready;
    unsigned workers, idle_workers, waiting_jobs;
};

extern struct tap tap;

#define TAP_LOCK() pthread_mutex_lock(&tap.lock)
#define TAP_UNLOCK() pthread_mutex_unlock(&tap.lock)

/* _tap_read.c */
#define WRITES_AT_ONCE 4 /* that others make while requests are read; as many buffers are kept */
bool tap_more_waits(int64_t nanoseconds);
ssize_t tap_read(int fd, void *buffer, size_t size, void *userdata);
void buffer_take(const char *buffer);
void buffer_give_back(char *buffer);

/* _tap_io.c */
bool tap_admit(char *data, size_t *len);
ssize_t tap_writev(int fd, struct iovec *iov, int count, void *userdata);
int64_t tap_now(void);
uint64_t key_of(uint64_t unique);
void tap_record(const struct in_header *header, const char *body, size_t body_len, bool dispatched);
ssize_t tap_answer(uint64_t unique, int error);
ssize_t tap_answer_with(uint64_t unique, const void *body, size_t len);

/* What becomes of a request: libfuse sees it, or it is answered later, at once, or served here. */
enum fate { FATE_PASSED, FATE_TAKEN, FATE_ANSWERED, FATE_SERVED };

/* READ, WRITE, or a FLUSH that is noted on the disk: done without the lock. */
struct data_call {
    uint32_t opcode;
    int fd;
    uint64_t unique, ino;
    bool in_memory; /* it waits for no disk */
    struct read_in read;
    struct write_in write;
    int64_t like[2]; /* FLUSH: what to note */
    char *message;   /* the request, in a buffer of tap_read's */
    size_t message_len;
};

/* _tap_brief.c. The first with the lock held, the second without it. */
enum fate tap_brief_fate(const struct in_header *header, const char *body, size_t len, int *error,
                         struct data_call *call);
void tap_mark_closed(const struct data_call *call);
bool tap_use_close_table(uint32_t device, void *table, size_t size);
bool tap_note_closing(uint64_t fh, uint32_t device, uint32_t slot, uint64_t file);
bool tap_note_interrupt(const char *body, size_t len);
void tap_event(uint32_t kind, uint64_t fh, uint32_t mode, uint64_t offset, uint64_t length);

/* _tap_data.c. The first with the lock held, the others without it. */
enum fate tap_accept_data(const struct in_header *header, const char *body, size_t len,
                          struct data_call *call);
enum fate tap_serve_data(const struct data_call *call);
bool tap_carry_out(const struct data_call *call);
void tap_finish_data(const struct data_call *call);

/* _tap_patience.c. The first without the lock. */
extern int64_t patience_ns;
enum fate patience_serve(const struct data_call *call);
unsigned patience_left(uint64_t ino);
bool patience_has(uint64_t unique);

/* _tap_arrived.c. Lock held. */
#define ARRIVAL_BLOCK (128ull << 10)
struct arrival {
    uint64_t start, end, chunk;
};
bool tap_note_arrived(uint64_t ino, uint64_t reader, uint64_t size, const struct arrival *what);
void tap_take_back(uint64_t ino);
bool tap_has_arrived(uint64_t ino, const struct read_in *in, uint64_t *reader);

/* _tap_small.c. The first without the lock, the last with it. */
bool small_serve(const struct in_header *header, const char *body, size_t len);
bool small_is_open(uint64_t fh);
void small_passed(const struct in_header *header);

/* _tap_fallocate.c */
enum fate tap_fallocate(char *data, size_t *len, int *error);
bool tap_resume_fallocate(const struct out_header *reply);
unsigned fallocate_left(uint64_t ino);

/* _tap_backing.c */
int backing_open(int fd);
int backing_close(int id);
int backing_acquire(uint64_t inode, int fd);
int backing_release(uint64_t inode);
size_t backing_retain(const struct map *inodes);
void backing_recover(void);

/* _tap_queue.c */
bool queue_in_use(void);
bool queue_add(uint64_t arrival, bool suspect, char *data, size_t len);
void queue_start(void);
void queue_give_back(char *data, size_t len);
ssize_t queue_take(char *buffer, size_t size);
void queue_answered(uint64_t unique);
int queue_open_poll(void);
void tap_pause(bool paused);

/* _tap_takeover.c */
int tap_take_over(void *session);

/* _tap_hook.c */
int tap_hook(const void *function_of_library);

/* _tap_session.c */
extern int (*const tap_own_mount)(void *, const char *);
int tap_resolve(const char *library, bool by_hook);
void tap_patch_init(struct init_out *out, const struct init_in *in);

#pragma GCC visibility pop
#endif
