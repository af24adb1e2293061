/* A layer between SQLite and its files: write-ahead logs for which there is a ring go through it
 * (_walring.c), everything else is served by SQLite's own functions.
 *
 * SQLite's headers are not needed to build this: what is declared here is part of its stable
 * interface (https://sqlite.org/c3ref/vfs.html, https://sqlite.org/c3ref/io_methods.html). Its
 * library is the one that Python's module has loaded.
 *
 * The shared-memory file of SQLite (the index of the log) moves to memory as well: a store to a page
 * of it that has been written back waits for a frozen filesystem, or its journal, like any write.
 *
 * A sync by the connection that has just written a new header is the log's own (frames must not
 * reach the disk before the header that gives them their sense): it is done by the worker, in its
 * turn. Any other comes from a checkpoint, and waits for everything (_walsync.c).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_walring.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#define OK 0
#define FULL 13
#define CANTOPEN 14
#define IOERR_SHORT_READ (10 | 2 << 8)
#define IOERR_WRITE (10 | 3 << 8)
#define IOERR_FSYNC (10 | 4 << 8)
#define OPEN_WAL 0x80000
#define NAME "cachefs-wal"

typedef struct methods methods;
typedef struct file { const methods *methods; } file;
typedef struct vfs vfs;
typedef int (*opener)(const char *, int, int);

struct methods {
    int version;
    int (*close)(file *);
    int (*read)(file *, void *, int, int64_t);
    int (*write)(file *, const void *, int, int64_t);
    int (*truncate)(file *, int64_t);
    int (*sync)(file *, int);
    int (*size)(file *, int64_t *);
    int (*lock)(file *, int);
    int (*unlock)(file *, int);
    int (*check_lock)(file *, int *);
    int (*control)(file *, int, void *);
    int (*sector)(file *);
    int (*device)(file *);
    void *of_later_versions[6];
};

struct vfs {
    int version, file_size, longest_path;
    vfs *next;
    const char *name;
    void *data;
    int (*open)(vfs *, const char *, file *, int, int *);
    int (*remove)(vfs *, const char *, int);
    void *others[10];
    void *of_version_2;
    int (*set_call)(vfs *, const char *, opener);
    opener (*get_call)(vfs *, const char *);
    void *next_call;
};

/* What SQLite has room for per file: this, and behind it a file of its own. */
struct wrapped {
    file base;
    struct log *log;
    bool header; /* the last call wrote the log's header */
    _Alignas(16) file own;
};

static vfs shim, *original;
static opener open_call;
static struct log *logs;
static pthread_mutex_t logs_lock = PTHREAD_MUTEX_INITIALIZER;

static struct wrapped *wrapped(file *given)
{
    struct wrapped *file = (struct wrapped *)given;

    file->header = false;
    return file;
}

static int own_close(file *given)
{
    struct wrapped *file = wrapped(given);

    ring_unused(file->log);
    return file->own.methods->close(&file->own);
}

/* A read that the worker overtook is done again: what it missed is in the file by now. So is one
 * while which the log began to be written anew. */
static int own_read(file *given, void *to, int count, int64_t at)
{
    struct wrapped *file = wrapped(given);
    uint64_t before;
    int rc;

    if (ring_overlay(file->log, to, (uint64_t)count, at))
        return OK;
    do {
        before = ring_progress(file->log);
        rc = ring_copied(file->log, to, (uint64_t)count, at)
                 ? OK
                 : file->own.methods->read(&file->own, to, count, at);
        if (rc != OK && rc != IOERR_SHORT_READ)
            return rc;
        ring_overlay(file->log, to, (uint64_t)count, at);
        if (rc == IOERR_SHORT_READ && at + count <= ring_end(file->log))
            rc = OK;
    } while (ring_progress(file->log) != before);
    return rc;
}

static int own_write(file *given, const void *from, int count, int64_t at)
{
    struct wrapped *file = wrapped(given);
    int error = ring_write(file->log, from, (uint64_t)count, at);

    file->header = !error && at == 0 && count == WAL_HEADER;
    return !error ? OK : error == ENOSPC ? FULL : IOERR_WRITE;
}

static int own_truncate(file *given, int64_t size)
{
    struct wrapped *file = wrapped(given);
    int rc;

    if (ring_drain(file->log))
        return IOERR_WRITE;
    rc = file->own.methods->truncate(&file->own, size);
    ring_refresh(file->log);
    return rc;
}

static int own_sync(file *given, int flags)
{
    struct wrapped *file = (struct wrapped *)given;
    bool header = file->header;

    (void)flags;
    file->header = false;
    if (header) {
        ring_barrier(file->log);
        return OK;
    }
    return ring_sync(file->log) ? IOERR_FSYNC : OK;
}

static int own_size(file *given, int64_t *size)
{
    struct wrapped *file = wrapped(given);
    int64_t end = ring_end(file->log);
    int rc = file->own.methods->size(&file->own, size);

    if (rc == OK && end > *size)
        *size = end;
    return rc;
}

#define OWN(given) (&((struct wrapped *)(given))->own)

static int own_lock(file *given, int kind)
{
    return OWN(given)->methods->lock(OWN(given), kind);
}

static int own_unlock(file *given, int kind)
{
    return OWN(given)->methods->unlock(OWN(given), kind);
}

static int own_check_lock(file *given, int *held)
{
    return OWN(given)->methods->check_lock(OWN(given), held);
}

static int own_control(file *given, int what, void *more)
{
    return OWN(given)->methods->control(OWN(given), what, more);
}

static int own_sector(file *given)
{
    return OWN(given)->methods->sector(OWN(given));
}

static int own_device(file *given)
{
    return OWN(given)->methods->device(OWN(given));
}

static const methods own_methods = {
    1,        own_close,  own_read,       own_write,   own_truncate, own_sync, own_size,
    own_lock, own_unlock, own_check_lock, own_control, own_sector,   own_device, {0},
};

static struct log *log_of(const char *path)
{
    struct log *log;

    pthread_mutex_lock(&logs_lock);
    for (log = logs; log && (!path || strcmp(log->path, path)); log = log->next)
        ;
    pthread_mutex_unlock(&logs_lock);
    return log;
}

static int open_file(vfs *self, const char *path, file *given, int flags, int *got)
{
    struct wrapped *file = (struct wrapped *)given;
    struct log *log = flags & OPEN_WAL && path ? log_of(path) : NULL;
    int rc;

    (void)self;
    if (!log)
        return original->open(original, path, given, flags, got);
    memset(file, 0, sizeof *file);
    rc = original->open(original, path, &file->own, flags, got);
    if (rc == OK && !ring_used(log)) {
        file->own.methods->close(&file->own);
        rc = CANTOPEN;
    }
    if (rc == OK) {
        file->log = log;
        file->base.methods = &own_methods;
    }
    return rc;
}

/* -- for Python --------------------------------------------------------------------------------- */

/* The index of a log that has a ring is opened where that is. */
static int open_index(const char *path, int flags, int mode)
{
    size_t length = strlen(path);
    struct log *log = NULL;

    if (length > 4 && !strcmp(path + length - 4, "-shm")) {
        pthread_mutex_lock(&logs_lock);
        for (log = logs; log; log = log->next)
            if (strlen(log->path) == length && !strncmp(log->path, path, length - 4))
                break;
        pthread_mutex_unlock(&logs_lock);
    }
    return open_call(log ? log->index : path, flags, mode);
}

static const char *add_layer(vfs *(*find)(const char *), int (*add)(vfs *, int))
{
    vfs *found = find(NULL);

    if (!found || found->version < 3 || !found->set_call || !found->get_call)
        return "its files are not known here";
    open_call = found->get_call(found, "open");
    memcpy(&shim, found, sizeof shim);
    shim.version = 3;
    shim.next = NULL;
    shim.name = NAME;
    shim.open = open_file;
    shim.file_size = (int)sizeof(struct wrapped) + found->file_size;
    if (!open_call || add(&shim, 0) || found->set_call(found, "open", open_index))
        return "it takes no other files";
    original = found;
    return NULL;
}

PyDoc_STRVAR(install_doc, "Register the layer with the SQLite that is loaded; its name. OSError.");

static PyObject *install(PyObject *module, PyObject *args)
{
    const char *library, *why;
    void *loaded;
    vfs *(*find)(const char *);
    int (*add)(vfs *, int);

    (void)module;
    if (!PyArg_ParseTuple(args, "s", &library))
        return NULL;
    if (original)
        return PyUnicode_FromString(NAME);
    loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (!loaded)
        return PyErr_Format(PyExc_OSError, "%s is not in use here", library);
    *(void **)&find = dlsym(loaded, "sqlite3_vfs_find");
    *(void **)&add = dlsym(loaded, "sqlite3_vfs_register");
    why = find && add ? add_layer(find, add) : "it is none";
    if (why)
        return PyErr_Format(PyExc_OSError, "%s cannot be used: %s", library, why);
    return PyUnicode_FromString(NAME);
}

static void destroy(PyObject *capsule)
{
    (void)capsule; /* a log is given up by `detach` alone: SQLite may have it open */
}

static struct log *given_log(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, NAME);
}

PyDoc_STRVAR(attach_doc, "Keep what is written to a log in a ring. (path, path of its index, fd, patience in s)");

static PyObject *attach(PyObject *module, PyObject *args)
{
    const char *path, *index;
    int fd;
    double patience;
    struct log *log;

    (void)module;
    if (!PyArg_ParseTuple(args, "yyid", &path, &index, &fd, &patience))
        return NULL;
    if (log_of(path))
        return PyErr_Format(PyExc_OSError, "%s has a ring already", path);
    log = ring_new(path, index, fd, (int64_t)(patience * 1e9));
    if (!log)
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    pthread_mutex_lock(&logs_lock);
    log->next = logs;
    logs = log;
    pthread_mutex_unlock(&logs_lock);
    return PyCapsule_New(log, NAME, destroy);
}

PyDoc_STRVAR(detach_doc, "Give a log up that nobody has open; whether nothing is left in its ring.");

static PyObject *detach(PyObject *module, PyObject *capsule)
{
    struct log *log = given_log(capsule), **at;
    bool empty;

    (void)module;
    if (!log)
        return NULL;
    if (log->users)
        return PyErr_Format(PyExc_OSError, "%s is in use", log->path);
    pthread_mutex_lock(&logs_lock);
    for (at = &logs; *at && *at != log; at = &(*at)->next)
        ;
    if (*at)
        *at = log->next;
    pthread_mutex_unlock(&logs_lock);
    PyCapsule_SetName(capsule, NULL); /* never again */
    Py_BEGIN_ALLOW_THREADS
    empty = ring_empty(log);
    ring_free(log);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(empty);
}

static PyObject *answered(struct log *log, int error)
{
    if (!error)
        Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrnoWithFilename(PyExc_OSError, log->path);
}

static PyObject *waited(PyObject *capsule, int (*wait)(struct log *))
{
    struct log *log = given_log(capsule);
    int error;

    if (!log)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = wait(log);
    Py_END_ALLOW_THREADS
    return answered(log, error);
}

PyDoc_STRVAR(drain_doc, "Wait until the log has all that was committed. OSError: it cannot.");

static PyObject *drain(PyObject *module, PyObject *capsule)
{
    (void)module;
    return waited(capsule, ring_drain);
}

PyDoc_STRVAR(sync_doc, "Wait until the disk has all that was committed. OSError: it does not.");

static PyObject *sync_log(PyObject *module, PyObject *capsule)
{
    (void)module;
    return waited(capsule, ring_sync);
}

PyDoc_STRVAR(renew_doc, "Write what the log begins with again. (log, bytes). OSError.");

static PyObject *renew(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    Py_buffer bytes;
    struct log *log;
    int error = EINVAL;

    (void)module;
    if (!PyArg_ParseTuple(args, "Oy*", &capsule, &bytes))
        return NULL;
    log = given_log(capsule);
    Py_BEGIN_ALLOW_THREADS
    if (log && bytes.len >= WAL_HEADER)
        error = ring_renew(log, bytes.buf, (uint64_t)bytes.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&bytes);
    return log ? answered(log, error) : NULL;
}

PyDoc_STRVAR(doubt_doc, "How many syncs had failed when the last did that is in doubt; 0: none is.");

static PyObject *doubt(PyObject *module, PyObject *capsule)
{
    struct log *log = given_log(capsule);
    uint64_t found;

    (void)module;
    if (!log)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    found = ring_doubt(log);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(found);
}

PyDoc_STRVAR(trust_doc, "All was written anew since so many syncs had failed. (log, how many)");

static PyObject *trust(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    unsigned long long failures;
    struct log *log;

    (void)module;
    if (!PyArg_ParseTuple(args, "OK", &capsule, &failures) || !(log = given_log(capsule)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    ring_trust(log, failures);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(state_doc, "(bytes that wait, seconds since they began to, errno)");

static PyObject *state(PyObject *module, PyObject *capsule)
{
    struct log *log = given_log(capsule);
    uint64_t pending;
    int64_t age;
    int error;

    (void)module;
    if (!log)
        return NULL;
    ring_state(log, &pending, &age, &error);
    return Py_BuildValue("Kdi", (unsigned long long)pending, (double)age / 1e9, error);
}

static PyMethodDef functions[] = {
    {"install", install, METH_VARARGS, install_doc},
    {"attach", attach, METH_VARARGS, attach_doc},
    {"detach", detach, METH_O, detach_doc},
    {"drain", drain, METH_O, drain_doc},
    {"sync", sync_log, METH_O, sync_doc},
    {"renew", renew, METH_VARARGS, renew_doc},
    {"doubt", doubt, METH_O, doubt_doc},
    {"trust", trust, METH_VARARGS, trust_doc},
    {"state", state, METH_O, state_doc},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_walvfs", "Commits that a stalled disk does not stop.", -1, functions,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__walvfs(void)
{
    return PyModule_Create(&definition);
}
