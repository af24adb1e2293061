/* Disks whose writes are written down: files of a FUSE filesystem, for loop devices to stand on.

   recorder DIRECTORY LOG IMAGE...

   DIRECTORY/0, DIRECTORY/1, ... have the content of the images. Every write to them is appended to
   LOG before it is answered, and so is every flush (fsync: what a loop device makes of a cache
   flush). What was written to a disk since its last flush may be lost, in any part and in any
   order, when the power goes. */

#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <linux/falloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define DISKS 4

enum kind { WRITE = 1, FLUSH = 2, ZERO = 3 };

struct entry {
    uint32_t kind, disk;
    uint64_t offset, length;
};

static int images[DISKS], disks, logfile;

static int append(uint32_t kind, uint32_t disk, uint64_t offset, uint64_t length, const void *data)
{
    struct entry head = {kind, disk, offset, length};
    struct iovec parts[2] = {{&head, sizeof head}, {(void *)data, data ? length : 0}};
    ssize_t total = sizeof head + (data ? length : 0);

    return writev(logfile, parts, 2) == total ? 0 : -EIO;
}

static int disk_of(const char *path)
{
    int number = path[1] - '0';
    return path[1] && !path[2] && number >= 0 && number < disks ? number : -1;
}

static int get_attributes(const char *path, struct stat *out, struct fuse_file_info *info)
{
    (void)info;
    if (strcmp(path, "/") == 0) {
        memset(out, 0, sizeof *out);
        out->st_mode = S_IFDIR | 0700;
        out->st_nlink = 2;
        return 0;
    }
    int disk = disk_of(path);
    return disk < 0 ? -ENOENT : fstat(images[disk], out) ? -errno : 0;
}

static int open_disk(const char *path, struct fuse_file_info *info)
{
    info->direct_io = 1;
    info->fh = disk_of(path);
    return disk_of(path) < 0 ? -ENOENT : 0;
}

static int read_disk(const char *path, char *to, size_t size, off_t offset,
                     struct fuse_file_info *info)
{
    (void)path;
    ssize_t count = pread(images[info->fh], to, size, offset);
    return count < 0 ? -errno : (int)count;
}

static int write_disk(const char *path, const char *from, size_t size, off_t offset,
                      struct fuse_file_info *info)
{
    (void)path;
    if (pwrite(images[info->fh], from, size, offset) != (ssize_t)size)
        return -EIO;
    return append(WRITE, info->fh, offset, size, from) ? -EIO : (int)size;
}

static int flush_disk(const char *path, int data_only, struct fuse_file_info *info)
{
    (void)path, (void)data_only;
    return append(FLUSH, info->fh, 0, 0, NULL);
}

static int allocate(const char *path, int mode, off_t offset, off_t length,
                    struct fuse_file_info *info)
{
    (void)path;
    if (!(mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)))
        return -EOPNOTSUPP;
    if (fallocate(images[info->fh], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length))
        return -errno;
    return append(ZERO, info->fh, offset, length, NULL);
}

static void *begin(struct fuse_conn_info *connection, struct fuse_config *settings)
{
    connection->max_write = 1 << 20;
    settings->use_ino = 0;
    return NULL;
}

static const struct fuse_operations operations = {
    .init = begin,
    .getattr = get_attributes,
    .open = open_disk,
    .read = read_disk,
    .write = write_disk,
    .fsync = flush_disk,
    .fallocate = allocate,
};

int main(int count, char **words)
{
    if (count < 4 || count > 3 + DISKS) {
        fprintf(stderr, "recorder DIRECTORY LOG IMAGE...\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    logfile = open(words[2], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    for (; disks < count - 3; disks++) {
        images[disks] = open(words[3 + disks], O_RDWR | O_CLOEXEC);
        if (images[disks] < 0 || logfile < 0) {
            perror("recorder");
            return 1;
        }
    }
    char *arguments[] = {words[0], "-f", "-s", words[1], NULL};
    return fuse_main(4, arguments, &operations, NULL);
}
