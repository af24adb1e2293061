/* Preloaded into a daemon: lets system calls on chosen files fail as a broken disk would.
 *
 * The file that CACHEFS_TEST_BADCALLS names is mapped: a call, an errno and part of a path. While
 * its first byte is not zero, that call on such files fails; a counter tells how often it did. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct plan {
    char call[16];
    char part[104];
    int32_t error;
    uint32_t count;
};

static struct plan *plan;

__attribute__((constructor)) static void map_plan(void) {
    const char *name = getenv("CACHEFS_TEST_BADCALLS");
    int fd = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) plan = at;
}

static int fails(const char *call, const char *path) {
    if (!plan || !plan->call[0] || strcmp(plan->call, call) || !strstr(path, plan->part)) return 0;
    __atomic_add_fetch(&plan->count, 1, __ATOMIC_RELAXED);
    errno = plan->error;
    return 1;
}

static int fails_on(const char *call, int fd) {
    char link[40], path[1024];
    if (!plan || !plan->call[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return fails(call, path);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    return fails_on("write", fd) ? -1 : real(fd, data, size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    REAL(pread64);
    return fails_on("read", fd) ? -1 : real(fd, data, size, at);
}

ssize_t pread(int fd, void *data, size_t size, off_t at) { return pread64(fd, data, size, at); }

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
    REAL(preadv64);
    return fails_on("read", fd) ? -1 : real(fd, parts, count, at);
}

ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    REAL(preadv2);
    return fails_on("read", fd) ? -1 : real(fd, parts, count, at, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    REAL(preadv64v2);
    return fails_on("read", fd) ? -1 : real(fd, parts, count, at, flags);
}

int fsync(int fd) {
    REAL(fsync);
    return fails_on("sync", fd) ? -1 : real(fd);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    return fails_on("sync", fd) ? -1 : real(fd);
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    return fails_on("truncate", fd) ? -1 : real(fd, size);
}

int unlink(const char *path) {
    REAL(unlink);
    return fails("unlink", path) ? -1 : real(path);
}

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    REAL(open64);
    if ((flags & O_CREAT) && fails("create", path)) return -1;
    return fails("open", path) ? -1 : real(path, flags, mode);
}
