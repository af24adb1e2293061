/* FALLOCATE, which pyfuse3 does not know: done on the cache file by a few worker threads, since it
 * may wait for a disk.
 *
 * A handle that has not been written to may have no file of its own yet. Then libfuse gets an empty
 * WRITE in place of the request, so that the filesystem makes one ready and names it; its answer
 * stays here, and the request goes on. EOPNOTSUPP if no file was named: ENOSYS would switch the
 * operation off for the whole mount. The same for a file that is larger than the cache: programs go
 * on with what their libraries do in place of it.
 *
 * A request that waits holds no descriptor: the kernel keeps its handle open, and so the handle's file
 * stays the one to be found under its number. */
#include "_tap.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_WORKERS 4
#define MAX_WAITING 4096 /* each is a program that waits, and a place in the table of requests */
#define KNOWN_MODES (FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)

static struct job *running[MAX_WORKERS];

/* Passthrough files are held O_RDONLY (a writable descriptor would hide the end of the last
 * writer), so the writable one lives no longer than the call. */
static int writable(int fd)
{
    char path[64];
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return -1;
    if ((flags & O_ACCMODE) != O_RDONLY)
        return fcntl(fd, F_DUPFD_CLOEXEC, 3);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_WRONLY | O_CLOEXEC);
}

/* None for a file that is not all in the cache (its descriptor is given inverted). */
static bool whole_file(uint64_t fh, int *fd)
{
    uint64_t file = 0;
    bool found;

    TAP_LOCK();
    found = map_get(&tap.files, fh, &file);
    TAP_UNLOCK();
    *fd = (int)file;
    return found && (int64_t)file >= 0;
}

static int allocate(const struct job *job)
{
    int fd, error = 0;

    if (!whole_file(job->in.fh, &fd) || (job->in.mode & ~(uint32_t)KNOWN_MODES))
        return EOPNOTSUPP;
    if (job->in.offset > INT64_MAX || job->in.length > INT64_MAX)
        return EFBIG;
    fd = writable(fd);
    if (fd < 0)
        return errno;
    while (fallocate(fd, (int)job->in.mode, (off_t)job->in.offset, (off_t)job->in.length)) {
        error = errno;
        if (error != EINTR)
            break;
        error = 0;
    }
    close(fd);
    return error;
}

static void carry_out(struct job *job, struct job **mine)
{
    int error = allocate(job);

    TAP_LOCK();
    if (!error) /* before the reply: whoever sees the call return finds the event */
        tap_event(EVENT_FALLOCATE, job->in.fh, job->in.mode, job->in.offset, job->in.length);
    *mine = NULL;
    TAP_UNLOCK();
    tap_answer(job->unique, error);
    free(job);
}

static void *work(void *argument)
{
    struct job *job, **mine = argument;

    TAP_LOCK();
    for (;;) {
        tap.idle_workers++;
        while (!tap.jobs)
            pthread_cond_wait(&tap.jobs_ready, &tap.lock);
        tap.idle_workers--;
        job = tap.jobs;
        tap.jobs = job->next;
        tap.waiting_jobs--;
        *mine = job;
        TAP_UNLOCK();
        carry_out(job, mine);
        TAP_LOCK();
    }
    return NULL;
}

static bool start_worker(void)
{
    pthread_t thread;
    sigset_t all, before;
    int failed;

    sigfillset(&all); /* signals are for Python's main thread */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = pthread_create(&thread, NULL, work, &running[tap.workers]);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return false;
    pthread_detach(thread);
    tap.workers++;
    return true;
}

static void append(struct job *job)
{
    if (tap.jobs)
        tap.jobs_tail->next = job;
    else
        tap.jobs = job;
    tap.jobs_tail = job;
    tap.waiting_jobs++;
    pthread_cond_signal(&tap.jobs_ready);
}

static bool worker_there(void)
{
    return (tap.waiting_jobs < tap.idle_workers || tap.workers >= MAX_WORKERS)
        || start_worker() || tap.workers;
}

static void ask_for_file(char *data, size_t *len, const struct fallocate_in *in)
{
    struct in_header header;
    struct write_in empty = {.fh = in->fh};

    memcpy(&header, data, sizeof header);
    if (header.uid) /* as near as can be: the kernel says who lacks CAP_FSETID for writes only */
        empty.write_flags = WRITE_KILL_SUIDGID;
    header.opcode = OP_WRITE;
    header.len = sizeof header + sizeof empty;
    memcpy(data, &header, sizeof header);
    memcpy(data + sizeof header, &empty, sizeof empty);
    *len = header.len;
}

/* Called with the lock held, with a request that may become another in its place. */
enum fate tap_fallocate(char *data, size_t *len, int *error)
{
    struct in_header header;
    struct job *job;
    uint64_t file, held;

    *error = EINVAL;
    if (*len < sizeof header + sizeof job->in)
        return FATE_ANSWERED;
    *error = EINTR; /* again, that is */
    if (tap.waiting_jobs >= MAX_WAITING)
        return FATE_ANSWERED;
    *error = ENOMEM;
    job = worker_there() ? calloc(1, sizeof *job) : NULL;
    if (!job)
        return FATE_ANSWERED;
    memcpy(&header, data, sizeof header);
    job->unique = header.unique;
    job->ino = header.nodeid;
    memcpy(&job->in, data + sizeof header, sizeof job->in);
    if (map_get(&tap.files, job->in.fh, &file) && !map_get(&tap.held, job->ino, &held)) {
        append(job);
        return FATE_TAKEN;
    }
    job->next = tap.parked;
    tap.parked = job;
    ask_for_file(data, len, &job->in);
    return FATE_PASSED;
}

/* Called with the lock held: true when this was the answer to an empty WRITE of ours, and a worker
 * will answer the caller. A refusal is for the caller itself. */
bool tap_resume_fallocate(const struct out_header *reply)
{
    struct job **link = &tap.parked, *job;

    while ((job = *link) && job->unique != reply->unique)
        link = &job->next;
    if (!job)
        return false;
    *link = job->next;
    if (reply->error) {
        free(job);
        return false;
    }
    job->next = NULL;
    append(job);
    return true;
}

/* Called with the lock held: how many will be done, or are, on the cache file that a file has now. */
unsigned fallocate_left(uint64_t ino)
{
    unsigned count = 0;

    for (const struct job *job = tap.jobs; job; job = job->next)
        count += job->ino == ino;
    for (size_t i = 0; i < MAX_WORKERS; i++)
        count += running[i] && running[i]->ino == ino;
    return count;
}
