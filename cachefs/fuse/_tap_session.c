/* How the tap gets between pyfuse3 and libfuse, and what it negotiates.
 *
 * pyfuse3 calls fuse_session_mount; as this object was loaded RTLD_GLOBAL before pyfuse3, the call
 * arrives here. The tap needs no libfuse to build: it asks the dynamic linker for the functions of
 * the very library that pyfuse3 is linked to, and picks the calling form by what that library has.
 * Where that has no custom I/O, its calls are redirected (_tap_hook.c).
 */
#include "_tap.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* As in fuse_lowlevel.h; later versions append members, the size says that these four are meant. */
struct custom_io {
    ssize_t (*writev)(int fd, struct iovec *iov, int count, void *userdata);
    ssize_t (*read)(int fd, void *buffer, size_t size, void *userdata);
    void *splice_receive, *splice_send;
};

#define WITHOUT_CUSTOM_IO 318 /* fuse_version() from which it may have been left out */
#define MAX_BACKGROUND 65535 /* a RELEASE must never wait in the kernel behind a limit */

static int fail(const char *why)
{
    if (!tap.why[0])
        snprintf(tap.why, sizeof tap.why, "%s", why);
    return -1;
}

static int hook(void)
{
    tap.hooked = !tap_hook((void *)(uintptr_t)tap.real_mount);
    return tap.hooked ? 0 : fail("libfuse has no custom I/O, and its calls cannot be redirected");
}

static int resolve(const char *library, bool by_hook)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    void *seen = dlsym(RTLD_DEFAULT, "fuse_session_mount");
    int (*version)(void) = NULL;

    if (!handle)
        return fail("pyfuse3 is not loaded");
    *(void **)&tap.real_mount = dlsym(handle, "fuse_session_mount");
    *(void **)&tap.session_fd = dlsym(handle, "fuse_session_fd");
    *(void **)&tap.process_buf = dlsym(handle, "fuse_session_process_buf");
    *(void **)&tap.io_317 = dlsym(handle, "fuse_session_custom_io_317");
    /* By version: under the same name later libraries have a function of four arguments. */
    *(void **)&tap.io_314 = dlvsym(handle, "fuse_session_custom_io", "FUSE_3.0");
    *(void **)&version = dlsym(handle, "fuse_version");
    dlclose(handle);
    if (seen != (void *)tap_own_mount)
        return fail("the tap was not loaded for all to see (RTLD_GLOBAL)");
    if (!tap.real_mount || tap.real_mount == tap_own_mount || !tap.session_fd || !tap.process_buf)
        return fail("libfuse's functions cannot be found");
    if (!tap.io_317 && !tap.io_314)
        return fail("libfuse is older than 3.14");
    return by_hook || (version && version() >= WITHOUT_CUSTOM_IO) ? hook() : 0;
}

int tap_resolve(const char *library, bool by_hook)
{
    tap.configured = tap.configured && !resolve(library, by_hook);
    return tap.configured ? 0 : -1;
}

/* Only what the kernel offered may be asked of it. */
void tap_patch_init(struct init_out *out, const struct init_in *in)
{
    bool extended = (in->flags & INIT_EXT) != 0;
    uint32_t offered2 = extended ? in->flags2 : 0;

    out->flags &= ~INIT_WRITEBACK_CACHE; /* excludes passthrough */
    /* One lookup that waits for the store must not keep all others in its directory. */
    out->flags |= in->flags & (INIT_HANDLE_KILLPRIV_V2 | INIT_EXT | INIT_PARALLEL_DIROPS);
    out->flags2 |= offered2 & (INIT2_HAS_RESEND | INIT2_DIRECT_IO_ALLOW_MMAP);
    if (tap.want_passthrough && (offered2 & INIT2_PASSTHROUGH)) {
        out->flags2 |= INIT2_PASSTHROUGH;
        out->max_stack_depth = tap.stack_depth;
    }
    out->max_readahead = READAHEAD;
    out->max_background = MAX_BACKGROUND;
    out->congestion_threshold = MAX_BACKGROUND / 4 * 3;
}

static int prepare_device(int fd)
{
    int flags = fcntl(fd, F_GETFL);

    /* Children (movers) must not hold the connection. */
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC))
        return fail("cannot set up the FUSE descriptor");
    tap.device = fd;
    return queue_open_poll() ? fail("cannot set up polling of the FUSE descriptor") : 0;
}

/* What libfuse polls is to be under the number that it has for the device. */
static int take_the_place_of(int fd)
{
    if (dup3(tap.poll, fd, O_CLOEXEC) < 0)
        return fail("cannot set up polling of the FUSE descriptor");
    close(tap.poll);
    tap.poll = fd;
    return 0;
}

static int enter_by_hook(void *session)
{
    int fd = tap.session_fd(session), device = fcntl(fd, F_DUPFD_CLOEXEC, 3);

    if (device < 0)
        return fail("cannot set up the FUSE descriptor");
    return prepare_device(device) || take_the_place_of(fd) ? -1 : 0;
}

static int install(void *session)
{
    struct custom_io io = {.writev = tap_writev, .read = tap_read};
    int result = tap.io_317 ? tap.io_317(session, &io, sizeof io, tap.poll)
                            : tap.io_314(session, &io, tap.poll);

    return result ? fail("libfuse refused the tap") : 0;
}

static int mount(void *session, const char *mountpoint)
{
    int result = tap.real_mount(session, mountpoint);

    if (result)
        return result;
    if (tap.hooked ? enter_by_hook(session)
                   : prepare_device(tap.session_fd(session)) || install(session))
        return -1;
    tap.mounted = true;
    return tap.state.header->init_state ? tap_take_over(session) : 0;
}

/* A session of somebody who did not ask for the tap: pass the call on. */
static int mount_untapped(void *session, const char *mountpoint, void *caller)
{
    Dl_info info;
    void *handle = dladdr(caller, &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
    int (*real)(void *, const char *) = NULL;

    if (handle) {
        *(void **)&real = dlsym(handle, "fuse_session_mount");
        dlclose(handle);
    }
    if (!real || real == tap_own_mount)
        return fail("libfuse's fuse_session_mount cannot be found");
    return real(session, mountpoint);
}

TAP_EXPORT int fuse_session_mount(void *session, const char *mountpoint);

int fuse_session_mount(void *session, const char *mountpoint)
{
    if (tap.configured)
        return mount(session, mountpoint);
    return mount_untapped(session, mountpoint, __builtin_return_address(0));
}

int (*const tap_own_mount)(void *, const char *) = fuse_session_mount;
