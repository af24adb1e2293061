/* Whether what was written to the log is on the disk.
 *
 * The kernel tells of a write-back that failed once, and takes those bytes for written: the next
 * sync says that all is well (https://wiki.postgresql.org/wiki/Fsync_Errors). So what a sync has
 * failed for is in doubt until all of the log has been written once more, and synced.
 *
 * Rules
 * - All syncs of a log use one descriptor and one lock: no other one can take an error away unseen.
 * - While there is doubt `ring_sync` fails. It is ended by `ring_renew` for all of the log, and then
 *   `ring_trust`; that of a failure which came meanwhile stays.
 * - What was written anew is read again, from the disk: ext4 may go on to take blocks for unwritten
 *   whose first write failed, until it has let go of what it had in memory. Who reads the log then
 *   is given the copy.
 */
#include "_walring.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define ATTEMPTS 3

static int sync_file(struct log *log)
{
    int error = fdatasync(log->fd) ? errno : 0;

    if (error)
        log->failures++;
    return error;
}

static int write_all(int fd, const unsigned char *bytes, uint64_t count, off_t at)
{
    while (count) {
        ssize_t done = pwrite(fd, bytes, count, at);
        if (done <= 0)
            return done < 0 ? errno : ENOSPC;
        bytes += done, at += done, count -= (uint64_t)done;
    }
    return 0;
}

/* The header has to be on the disk: it is written once more, in case that this was tried before. */
int ring_sync_header(struct log *log)
{
    unsigned char header[WAL_HEADER];
    int error = pread(log->fd, header, sizeof header, 0) == sizeof header ? 0 : EIO;

    pthread_mutex_lock(&log->syncing);
    if (!error)
        error = write_all(log->fd, header, sizeof header, 0);
    if (!error)
        error = sync_file(log);
    pthread_mutex_unlock(&log->syncing);
    return error;
}

/* Returns once all that was written before the call is on the disk, or an errno. */
int ring_sync(struct log *log)
{
    int error = ring_drain(log);

    pthread_mutex_lock(&log->syncing);
    if (!error)
        error = log->failures != log->trusted ? EIO : sync_file(log);
    pthread_mutex_unlock(&log->syncing);
    return error;
}

/* The number of failures so far; 0: none of them matters any more. */
uint64_t ring_doubt(struct log *log)
{
    uint64_t doubt;

    pthread_mutex_lock(&log->syncing);
    doubt = log->failures != log->trusted ? log->failures : 0;
    pthread_mutex_unlock(&log->syncing);
    return doubt;
}

/* Since the last of so many failures all of the log was written anew. */
void ring_trust(struct log *log, uint64_t failures)
{
    pthread_mutex_lock(&log->syncing);
    log->trusted = failures;
    pthread_mutex_unlock(&log->syncing);
}

/* Whether the range is in the copy, which then is put there. */
bool ring_copied(struct log *log, unsigned char *to, uint64_t count, int64_t at)
{
    bool is;

    pthread_mutex_lock(&log->lock);
    is = log->copy && (uint64_t)at + count <= log->copied;
    if (is)
        memcpy(to, log->copy + at, count);
    pthread_mutex_unlock(&log->lock);
    return is;
}

static bool equals(int fd, const unsigned char *bytes, uint64_t count)
{
    unsigned char found[1 << 14];
    uint64_t at = 0;

    while (at < count) {
        ssize_t done = pread(fd, found, least(sizeof found, count - at), (off_t)at);
        if (done <= 0 || memcmp(found, bytes + at, (size_t)done))
            return false;
        at += (uint64_t)done;
    }
    return true;
}

static int renew(struct log *log, const unsigned char *bytes, uint64_t count)
{
    int error, attempt;

    for (attempt = 0; attempt < ATTEMPTS; attempt++) {
        error = write_all(log->fd, bytes, count, 0);
        if (!error && fdatasync(log->fd))
            error = errno;
        if (error)
            return error;
        posix_fadvise(log->fd, 0, 0, POSIX_FADV_DONTNEED);
        if (equals(log->fd, bytes, count))
            return 0;
    }
    return EIO;
}

static void set_copy(struct log *log, const unsigned char *bytes, uint64_t count)
{
    pthread_mutex_lock(&log->lock);
    log->copy = bytes;
    log->copied = count;
    STORE(log->renewals, log->renewals + 1);
    pthread_mutex_unlock(&log->lock);
}

/* Write what the file begins with once more, until it is on the disk. EAGAIN: it has another header
 * by now. */
int ring_renew(struct log *log, const unsigned char *bytes, uint64_t count)
{
    int error = EAGAIN;

    pthread_mutex_lock(&log->lock);
    while (log->writing || log->renewing)
        pthread_cond_wait(&log->progress, &log->lock);
    log->renewing = true;
    pthread_mutex_unlock(&log->lock);
    if (equals(log->fd, bytes, WAL_HEADER)) {
        set_copy(log, bytes, count);
        error = renew(log, bytes, count);
        set_copy(log, NULL, 0);
    }
    pthread_mutex_lock(&log->lock);
    log->renewing = false;
    pthread_cond_signal(&log->work);
    pthread_cond_broadcast(&log->progress);
    pthread_mutex_unlock(&log->lock);
    return error;
}
