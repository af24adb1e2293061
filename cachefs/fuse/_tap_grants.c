/* Python's side of small files: grants, spares, and the fold. See _tap_small.c. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_tap_small.h"
#include "_tap_python.h"

#include <sys/mman.h>

PyObject *py_small_start(PyObject *self, PyObject *args)
{
    unsigned long long seq, start, room;
    double valid;

    (void)self;
    if (!PyArg_ParseTuple(args, "iiIKKKd", &small.journal, &small.wake, &small.seed, &seq, &start,
                          &room, &valid))
        return NULL;
    if (small.clock < 0 && (small.clock = memfd_create("cachefs-clock", MFD_CLOEXEC)) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    journal_prepare();
    small.seq = seq;
    small.start = (off_t)start;
    small.room = (off_t)room;
    small.valid = (uint64_t)valid;
    small.valid_nsec = (uint32_t)((valid - (double)small.valid) * 1e9);
    small.on = true;
    Py_RETURN_NONE;
}

static void set_times(struct fuse_attr *attr, long long atime, long long mtime, long long ctime)
{
    attr->atime = (uint64_t)(atime / 1000000000);
    attr->atimensec = (uint32_t)(atime % 1000000000);
    attr->mtime = (uint64_t)(mtime / 1000000000);
    attr->mtimensec = (uint32_t)(mtime % 1000000000);
    attr->ctime = (uint64_t)(ctime / 1000000000);
    attr->ctimensec = (uint32_t)(ctime % 1000000000);
}

static bool add_name(struct granted *granted, PyObject *name)
{
    char *bytes;
    Py_ssize_t len;

    if (PyBytes_AsStringAndSize(name, &bytes, &len))
        return false;
    if (!map_put(&granted->names, small_hash(bytes, (size_t)len), 1)) {
        PyErr_NoMemory();
        return false;
    }
    return true;
}

static bool add_names(struct granted *granted, PyObject *names)
{
    PyObject *item, *iterator = PyObject_GetIter(names);

    while (iterator && (item = PyIter_Next(iterator))) {
        bool added = add_name(granted, item);

        Py_DECREF(item);
        if (!added)
            break;
    }
    Py_XDECREF(iterator);
    return !PyErr_Occurred();
}

PyObject *py_small_grant(PyObject *self, PyObject *args)
{
    struct granted *granted, new = {0};
    unsigned long long ino, size, blocks;
    long long atime, mtime, ctime, lasts;
    Py_ssize_t name_room;
    PyObject *names;
    int root;

    (void)self;
    if (!PyArg_ParseTuple(args, "(KIIIIKKLLL)npOL", &ino, &new.attr.mode, &new.attr.uid,
                          &new.attr.gid, &new.attr.nlink, &size, &blocks, &atime, &mtime, &ctime,
                          &name_room, &root, &names, &lasts))
        return NULL;
    if (!small.on || small.withheld || name_room < 1)
        Py_RETURN_FALSE;
    new.ino = new.attr.ino = ino;
    new.attr.size = size;
    new.attr.blocks = blocks;
    new.attr.blksize = 4096;
    set_times(&new.attr, atime, mtime, ctime);
    new.name_room = (size_t)name_room;
    new.root = root;
    new.until = tap_now() + lasts;
    if (!add_names(&new, names)) {
        map_clear(&new.names);
        return NULL;
    }
    granted = small_granted(ino);
    if (!granted)
        granted = &small.granted[small.next_granted++ % MAX_GRANTED];
    small_revoke(granted);
    *granted = new;
    Py_RETURN_TRUE;
}

/* A name that Python made in a directory: False if that is not granted (any more). */
PyObject *py_small_note(PyObject *self, PyObject *args)
{
    struct granted *granted;
    unsigned long long ino;
    long long atime, time, lasts;
    PyObject *name;

    (void)self;
    if (!PyArg_ParseTuple(args, "KSLL", &ino, &name, &time, &lasts))
        return NULL;
    granted = small_granted(ino);
    if (!granted)
        Py_RETURN_FALSE;
    if (!add_name(granted, name)) {
        small_revoke(granted);
        return NULL;
    }
    atime = (long long)granted->attr.atime * 1000000000 + granted->attr.atimensec;
    set_times(&granted->attr, atime, time, time);
    granted->until = tap_now() + lasts;
    Py_RETURN_TRUE;
}

PyObject *py_small_revoke(PyObject *self, PyObject *args)
{
    struct granted *granted;
    unsigned long long ino;

    (void)self;
    if (!PyArg_ParseTuple(args, "K", &ino))
        return NULL;
    granted = small_granted(ino);
    if (granted)
        small_revoke(granted);
    Py_RETURN_NONE;
}

PyObject *py_small_spare(PyObject *self, PyObject *args)
{
    unsigned long long ino, gen, file, fh;
    struct spare spare = {0};
    int in_memory;

    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKIip", &ino, &gen, &file, &fh, &spare.device, &spare.fd,
                          &in_memory))
        return NULL;
    if (small.spare_count == MAX_SPARES) {
        PyErr_SetString(PyExc_ValueError, "too many spare files");
        return NULL;
    }
    spare.ino = ino, spare.gen = gen, spare.file = file, spare.fh = fh;
    spare.in_memory = in_memory;
    small.spares[(small.spare_head + small.spare_count++) % MAX_SPARES] = spare;
    Py_RETURN_NONE;
}

PyObject *py_small_pending(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return PyLong_FromLongLong(small.used);
}

PyObject *py_small_folded(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    TAP_LOCK();
    for (size_t i = 0; i < small.open.slots; i++)
        if (small.open.used[i])
            map_put(&tap.budgets, small.open.keys[i], 0);
    TAP_UNLOCK();
    map_clear(&small.open);
    small.used = 0;
    Py_RETURN_NONE;
}

PyObject *py_small_withhold(PyObject *self, PyObject *args)
{
    int withheld, spares;

    (void)self;
    if (!PyArg_ParseTuple(args, "pp", &withheld, &spares))
        return NULL;
    small.withheld = withheld;
    for (size_t i = 0; i < MAX_GRANTED; i++)
        small_revoke(&small.granted[i]);
    if (spares)
        small.spare_count = 0;
    Py_RETURN_NONE;
}

PyObject *py_small_info(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return Py_BuildValue("(Kn)", (unsigned long long)small.served, (Py_ssize_t)small.spare_count);
}
