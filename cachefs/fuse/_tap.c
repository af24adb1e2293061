/* The tap: sits between libfuse and the kernel and adds what pyfuse3 lacks.
 *
 *  - INIT: asks for passthrough, for resending of requests and for HANDLE_KILLPRIV_V2.
 *  - OPEN, CREATE: chosen handles are opened in passthrough on a backing id.
 *  - FALLOCATE: done here, on the cache file.
 *  - Takeover: what the next daemon needs lives in memory that outlasts this one.
 *
 * It is at once the extension module cachefs.fuse._tap and, loaded RTLD_GLOBAL before pyfuse3, the
 * object whose fuse_session_mount pyfuse3 ends up calling. Parts: _tap_session.c and _tap_hook.c
 * (getting in between, negotiating), _tap_read.c, _tap_io.c (requests and replies), _tap_queue.c (requests read
 * ahead), _tap_data.c and _tap_patience.c (bytes), _tap_small.c, _tap_journal.c and _tap_grants.c (small files), _tap_takeover.c,
 * _tap_backing.c, _tap_fallocate.c, _tap_state.c (tables). This file: the Python
 * functions, all of them short and taking the lock for table work only.
 *
 * Lock order: GIL, then tap.lock. Nothing of Python is called with tap.lock held; allocation of
 * Python objects happens on copies. Reads and writes of the device happen without tap.lock.
 *
 * The state (a memfd of 4 MiB, numbers in the byte order of the machine, offsets in bytes):
 *
 *     0  u32 magic "CFT1"        4  u32 version
 *     8  u32 flags               bit 0: a takeover is possible (set by the tap after INIT)
 *    12  u32 epoch               written by the supervisor before each start
 *    16  u64 takeovers           written by the supervisor
 *    24  u32 death               written by the supervisor before a restart: 0 the daemon failed,
 *                                1 it was killed from outside (SIGKILL). A request is given up on
 *                                after two failures or after five kills while it was being handled
 *    28  u32 init_state          1: the INIT fields below are complete
 *    32  u64 arrivals            number of the last request recorded
 *    40  i32 last_backing_id     44, 48, 52  u32 slots of the three tables
 *    56  u32 lengths of          request, libfuse's reply, reply as sent
 *   128  u8[256] INIT request    384  u8[64] libfuse's reply    448  u8[64] reply as sent
 *  4096  in-flight table         64 bytes a slot, key: unique without bit 63
 *   ...  handle table            32 bytes a slot, key: fh
 *   ...  backing table           40 bytes a slot, key: inode
 *
 * Slots are struct inflight, struct handle and struct backing of _tap.h. Of a slot only the state
 * word counts until it says PENDING or LIVE. A handle is pending from before its OPEN reply until
 * after it; a backing entry is pending while its id is being closed.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_tap.h"
#include "_tap_python.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

struct tap tap = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .jobs_ready = PTHREAD_COND_INITIALIZER,
    .device = -1, .poll = -1, .timer = -1,
};

static PyObject *os_error(int negative)
{
    errno = -negative;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *number_or_error(int result)
{
    return result < 0 ? os_error(result) : PyLong_FromLong(result);
}

static PyObject *py_configure(PyObject *self, PyObject *args)
{
    int fd, passthrough, takeover;
    unsigned depth;

    (void)self;
    if (!PyArg_ParseTuple(args, "ippI", &fd, &passthrough, &takeover, &depth))
        return NULL;
    if (tap.configured) {
        PyErr_SetString(PyExc_RuntimeError, "the tap serves one mount per process");
        return NULL;
    }
    if (state_attach(&tap.state, fd, tap.why, sizeof tap.why)) {
        PyErr_SetString(PyExc_RuntimeError, tap.why);
        return NULL;
    }
    if (fd >= 0)
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    tap.want_passthrough = passthrough;
    tap.takeover_wanted = takeover && fd >= 0;
    tap.stack_depth = depth;
    tap.configured = true;
    Py_RETURN_NONE;
}

static PyObject *py_resolve(PyObject *self, PyObject *args)
{
    const char *library;
    int by_hook;

    (void)self;
    if (!PyArg_ParseTuple(args, "sp", &library, &by_hook))
        return NULL;
    return PyUnicode_FromString(tap_resolve(library, by_hook) ? tap.why : "");
}

static PyObject *py_why(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return PyUnicode_FromString(tap.why);
}

static PyObject *py_info(PyObject *self, PyObject *ignored)
{
    const struct tap_header *header = tap.state.header;
    struct init_out reply;
    unsigned long long takeovers;

    (void)self, (void)ignored;
    if (!header) {
        PyErr_SetString(PyExc_RuntimeError, "the tap is not configured");
        return NULL;
    }
    memset(&reply, 0, sizeof reply);
    if (__atomic_load_n(&header->init_state, __ATOMIC_ACQUIRE))
        memcpy(&reply, header->init_reply, sizeof reply);
    takeovers = header->takeovers;
    return Py_BuildValue(
        "{s:O,s:O,s:O,s:O,s:O,s:I,s:I,s:I,s:I,s:I,s:K,s:K,s:i}",
        "mounted", tap.mounted ? Py_True : Py_False,
        "hooked", tap.hooked ? Py_True : Py_False,
        "taken_over", tap.taken_over ? Py_True : Py_False,
        "negotiated", header->init_state ? Py_True : Py_False,
        "takeover_possible", header->flags & FLAG_TAKEOVER_POSSIBLE ? Py_True : Py_False,
        "flags", reply.flags, "flags2", reply.flags2, "max_write", reply.max_write,
        "stack_depth", reply.max_stack_depth, "epoch", header->epoch, "takeovers", takeovers,
        "unrecorded", (unsigned long long)tap.unrecorded, "libfuse", tap.io_317 ? 317 : 314);
}

/* ---- backing ids ---- */

static PyObject *py_backing_open(PyObject *self, PyObject *args)
{
    int fd, id;

    (void)self;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    TAP_LOCK();
    id = backing_open(fd);
    if (id > 0)
        tap.state.header->last_backing_id = id;
    TAP_UNLOCK();
    return number_or_error(id);
}

static PyObject *py_backing_close(PyObject *self, PyObject *args)
{
    int id, result;

    (void)self;
    if (!PyArg_ParseTuple(args, "i", &id))
        return NULL;
    result = backing_close(id);
    if (result)
        return os_error(result);
    Py_RETURN_NONE;
}

static PyObject *py_acquire(PyObject *self, PyObject *args)
{
    unsigned long long inode;
    int fd, id;

    (void)self;
    if (!PyArg_ParseTuple(args, "Ki", &inode, &fd))
        return NULL;
    TAP_LOCK();
    id = backing_acquire(inode, fd);
    TAP_UNLOCK();
    return number_or_error(id);
}

static PyObject *py_release(PyObject *self, PyObject *args)
{
    unsigned long long inode;
    int remaining;

    (void)self;
    if (!PyArg_ParseTuple(args, "K", &inode))
        return NULL;
    TAP_LOCK();
    remaining = backing_release(inode);
    TAP_UNLOCK();
    return number_or_error(remaining);
}

static PyObject *py_backing_for(PyObject *self, PyObject *args)
{
    unsigned long long inode;
    struct backing *entry;
    int id = 0;

    (void)self;
    if (!PyArg_ParseTuple(args, "K", &inode))
        return NULL;
    TAP_LOCK();
    entry = backing_find(&tap.state, inode);
    if (entry)
        id = entry->id;
    TAP_UNLOCK();
    if (!id)
        Py_RETURN_NONE;
    return PyLong_FromLong(id);
}

static PyObject *py_retain(PyObject *self, PyObject *args)
{
    PyObject *inodes, *iterator, *item;
    struct map keep = {0};
    size_t closed = 0;

    (void)self;
    if (!PyArg_ParseTuple(args, "O", &inodes) || !(iterator = PyObject_GetIter(inodes)))
        return NULL;
    while ((item = PyIter_Next(iterator))) {
        unsigned long long inode = PyLong_AsUnsignedLongLong(item);

        Py_DECREF(item);
        if (!PyErr_Occurred() && !map_put(&keep, inode, 1))
            PyErr_NoMemory();
        if (PyErr_Occurred())
            break;
    }
    Py_DECREF(iterator);
    if (!PyErr_Occurred()) {
        TAP_LOCK();
        closed = backing_retain(&keep);
        TAP_UNLOCK();
    }
    map_clear(&keep);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(closed);
}

/* ---- handles ---- */

static PyObject *put(struct map *map, PyObject *args)
{
    unsigned long long key;
    int value;
    bool done;

    if (!PyArg_ParseTuple(args, "Ki", &key, &value))
        return NULL;
    TAP_LOCK();
    done = map_put(map, key, (uint64_t)value);
    TAP_UNLOCK();
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_set_passthrough(PyObject *self, PyObject *args)
{
    (void)self;
    return put(&tap.passthrough, args);
}

static PyObject *py_set_listing(PyObject *self, PyObject *args)
{
    unsigned long long fh;
    int keep;
    bool done;

    (void)self;
    if (!PyArg_ParseTuple(args, "Kp", &fh, &keep))
        return NULL;
    TAP_LOCK();
    done = map_put(&tap.listings, fh, OPEN_CACHE_DIR | (keep ? OPEN_KEEP_CACHE : 0));
    TAP_UNLOCK();
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_set_handle_fd(PyObject *self, PyObject *args)
{
    (void)self;
    return put(&tap.files, args);
}

static PyObject *py_set_reader(PyObject *self, PyObject *args)
{
    unsigned long long fh;
    int fd, in_memory;
    uint64_t ignored;
    bool done = true;

    (void)self;
    if (!PyArg_ParseTuple(args, "Kip", &fh, &fd, &in_memory))
        return NULL;
    TAP_LOCK();
    if (fd < 0)
        map_take(&tap.readers, fh, &ignored);
    else
        done = map_put(&tap.readers, fh, (uint64_t)fd << 1 | (in_memory ? 1 : 0));
    TAP_UNLOCK();
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_take_read(PyObject *self, PyObject *args)
{
    (void)self, (void)args;
    return PyLong_FromUnsignedLongLong(__atomic_exchange_n(&tap.read_bytes, 0, __ATOMIC_RELAXED));
}

static PyObject *py_drop_handle(PyObject *self, PyObject *args)
{
    unsigned long long fh;
    uint64_t ignored;

    (void)self;
    if (!PyArg_ParseTuple(args, "K", &fh))
        return NULL;
    TAP_LOCK();
    map_take(&tap.passthrough, fh, &ignored);
    map_take(&tap.files, fh, &ignored);
    map_take(&tap.closings, fh, &ignored);
    map_take(&tap.budgets, fh, &ignored);
    map_take(&tap.readers, fh, &ignored);
    TAP_UNLOCK();
    Py_RETURN_NONE;
}

static PyObject *py_brief(PyObject *self, PyObject *args)
{
    int on;

    (void)self;
    if (!PyArg_ParseTuple(args, "p", &on))
        return NULL;
    tap.brief = on;
    Py_RETURN_NONE;
}

static PyObject *py_rehearse(PyObject *self, PyObject *args)
{
    (void)self, (void)args;
    tap.rehearsal = true;
    Py_RETURN_NONE;
}

static PyObject *py_current(PyObject *self, PyObject *args)
{
    (void)self, (void)args;
    return PyLong_FromUnsignedLongLong(tap.current);
}

static PyObject *py_caller(PyObject *self, PyObject *args)
{
    (void)self, (void)args;
    return Py_BuildValue("(KI)", (unsigned long long)tap.current, tap.current_pid);
}

static PyObject *py_is_interrupted(PyObject *self, PyObject *args)
{
    unsigned long long request;
    uint64_t ignored;
    bool found;

    (void)self;
    if (!PyArg_ParseTuple(args, "K", &request))
        return NULL;
    TAP_LOCK();
    found = map_get(&tap.interrupted, request, &ignored);
    TAP_UNLOCK();
    return PyBool_FromLong(found);
}

static PyObject *py_pause(PyObject *self, PyObject *args)
{
    int paused;

    (void)self;
    if (!PyArg_ParseTuple(args, "p", &paused))
        return NULL;
    TAP_LOCK();
    tap_pause(paused);
    TAP_UNLOCK();
    Py_RETURN_NONE;
}

static PyObject *py_kills_privileges(PyObject *self, PyObject *args)
{
    (void)self, (void)args;
    return PyBool_FromLong(tap.kills_privileges);
}

static PyObject *py_times_of_now(PyObject *self, PyObject *args)
{
    (void)self, (void)args;
    return Py_BuildValue("(OO)", tap.times_of_now & SETATTR_ATIME_NOW ? Py_True : Py_False,
                         tap.times_of_now & SETATTR_MTIME_NOW ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"configure", py_configure, METH_VARARGS, "(state_fd, passthrough, takeover, stack_depth)"},
    {"resolve", py_resolve, METH_VARARGS, "(path of pyfuse3's shared object, by hook) -> why not, or ''"},
    {"why", py_why, METH_NOARGS, "() -> what went wrong last"},
    {"info", py_info, METH_NOARGS, "() -> dict"},
    {"backing_open", py_backing_open, METH_VARARGS, "(fd) -> backing id"},
    {"backing_close", py_backing_close, METH_VARARGS, "(backing id)"},
    {"acquire", py_acquire, METH_VARARGS, "(inode, fd) -> backing id"},
    {"release", py_release, METH_VARARGS, "(inode) -> handles that remain"},
    {"backing_for", py_backing_for, METH_VARARGS, "(inode) -> backing id or None"},
    {"retain", py_retain, METH_VARARGS, "(inodes) -> number of ids closed"},
    {"set_passthrough", py_set_passthrough, METH_VARARGS, "(fh, backing id)"},
    {"set_listing", py_set_listing, METH_VARARGS, "(fh, keep)"},
    {"set_handle_fd", py_set_handle_fd, METH_VARARGS, "(fh, fd)"},
    {"use_close_table", py_use_close_table, METH_VARARGS, "(device, memory) -> done"},
    {"set_closing", py_set_closing, METH_VARARGS, "(fh, device, slot, file) -> done"},
    {"set_budget", py_set_budget, METH_VARARGS, "(fh, bytes, is it in memory?)"},
    {"hold", py_hold, METH_VARARGS, "(inode, on)"},
    {"left", py_left, METH_VARARGS, "(inode) -> writes and FALLOCATEs that a disk holds up"},
    {"set_reader", py_set_reader, METH_VARARGS, "(fh, fd or -1, is it in memory?)"},
    {"arrived", py_arrived, METH_VARARGS,
     "(inode, fd, is it in memory?, size, start, end, chunk)"},
    {"take_back", py_take_back, METH_VARARGS, "(inode)"},
    {"take_read", py_take_read, METH_NOARGS, "() -> bytes read since the last call"},
    {"drop_handle", py_drop_handle, METH_VARARGS, "(fh)"},
    {"open_handles", py_open_handles, METH_NOARGS, "() -> [(fh, nodeid, flags, dir, passthrough)]"},
    {"inflight", py_inflight, METH_NOARGS, "() -> [(unique, opcode, nodeid, charge)]"},
    {"backings", py_backings, METH_NOARGS, "() -> [(inode, id, handles, dev, ino)]"},
    {"poisoned", py_poisoned, METH_NOARGS, "() -> [(unique, opcode, nodeid, body)]"},
    {"drain_events", py_drain_events, METH_NOARGS, "() -> [(kind, fh, mode, offset, length)]"},
    {"watch", py_watch, METH_VARARGS, "(nodeid)"},
    {"unwatch", py_unwatch, METH_VARARGS, "(nodeid)"},
    {"counts", py_counts, METH_VARARGS, "(nodeid or None) -> {opcode: requests}"},
    {"brief", py_brief, METH_VARARGS, "(on)"},
    {"rehearse", py_rehearse, METH_NOARGS, "the mount to come is a rehearsal of a takeover"},
    {"current", py_current, METH_NOARGS, "the request handed to libfuse last"},
    {"caller", py_caller, METH_NOARGS, "() -> (that request, pid of who waits for it)"},
    {"is_interrupted", py_is_interrupted, METH_VARARGS, "(request) -> did a signal come?"},
    {"kills_privileges", py_kills_privileges, METH_NOARGS, "is it to clear suid and sgid?"},
    {"times_of_now", py_times_of_now, METH_NOARGS, "(atime, mtime): is it set to now?"},
    {"pause", py_pause, METH_VARARGS, "(on)"},
    {"small_start", py_small_start, METH_VARARGS, "(journal, wake, seed, seq, start, room, ttl)"},
    {"small_grant", py_small_grant, METH_VARARGS,
     "(attributes, name_room, root, names, for so many ns) -> done"},
    {"small_note", py_small_note, METH_VARARGS,
     "(directory, name, time, for so many ns) -> is it granted"},
    {"small_revoke", py_small_revoke, METH_VARARGS, "(directory)"},
    {"small_spare", py_small_spare, METH_VARARGS, "(inode, gen, file, fh, device, fd, is it in memory?)"},
    {"small_pending", py_small_pending, METH_NOARGS, "() -> bytes in the journal"},
    {"small_folded", py_small_folded, METH_NOARGS, "the journal is in the database"},
    {"small_withhold", py_small_withhold, METH_VARARGS, "(grant nothing more, drop spares)"},
    {"small_info", py_small_info, METH_NOARGS, "() -> (names looked up, spares left)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_tap", "See the head of _tap.c; use cachefs.fuse.tap.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tap(void);

static void without_python(bool begin)
{
    static PyThreadState *thread;

    if (begin)
        thread = PyEval_SaveThread();
    else
        PyEval_RestoreThread(thread);
}

PyMODINIT_FUNC PyInit__tap(void)
{
    tap.without_python = without_python;
    return PyModule_Create(&module);
}
