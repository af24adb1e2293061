/* Tables, events and counters as Python lists. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_tap.h"
#include "_tap_python.h"

#include <stdlib.h>
#include <string.h>

typedef PyObject *(*describe)(const struct slot *slot);

static PyObject *describe_handle(const struct slot *slot)
{
    const struct handle *handle = (const struct handle *)slot;

    return Py_BuildValue("(KKIOO)", (unsigned long long)handle->fh,
                         (unsigned long long)handle->nodeid, handle->open_flags,
                         handle->state & HANDLE_DIR ? Py_True : Py_False,
                         handle->state & HANDLE_PASSTHROUGH ? Py_True : Py_False);
}

static PyObject *describe_inflight(const struct slot *slot)
{
    const struct inflight *entry = (const struct inflight *)slot;

    return Py_BuildValue("(KIKI)", (unsigned long long)entry->unique, entry->opcode,
                         (unsigned long long)entry->nodeid, entry->charge & ~CHARGE_DISPATCHED);
}

static PyObject *describe_backing(const struct slot *slot)
{
    const struct backing *entry = (const struct backing *)slot;

    return Py_BuildValue("(KiIKK)", (unsigned long long)entry->inode, entry->id, entry->count,
                         (unsigned long long)entry->dev, (unsigned long long)entry->ino);
}

/* A copy of the used slots, so that Python objects are made without the lock. */
static char *snapshot(const struct table *table, size_t *count)
{
    char *copy = NULL, *slot;
    uint32_t position = 0;

    *count = 0;
    TAP_LOCK();
    copy = PyMem_RawMalloc((size_t)(table->used + 1) * table->slot_size);
    while (copy && (slot = table_each(table, &position)))
        memcpy(copy + (*count)++ * table->slot_size, slot, table->slot_size);
    TAP_UNLOCK();
    return copy;
}

static PyObject *list_of(const struct table *table, describe make)
{
    size_t count;
    char *copy = snapshot(table, &count);
    PyObject *list = copy ? PyList_New((Py_ssize_t)count) : PyErr_NoMemory();

    for (size_t i = 0; list && i < count; i++) {
        PyObject *item = make((const struct slot *)(copy + i * table->slot_size));

        if (item)
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
        else
            Py_CLEAR(list);
    }
    PyMem_RawFree(copy);
    return list;
}

PyObject *py_open_handles(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return list_of(&tap.state.handles, describe_handle);
}

PyObject *py_inflight(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return list_of(&tap.state.inflight, describe_inflight);
}

PyObject *py_backings(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return list_of(&tap.state.backing, describe_backing);
}

/* Written within fuse_session_mount only, so no lock. */
PyObject *py_poisoned(PyObject *self, PyObject *ignored)
{
    PyObject *list = PyList_New((Py_ssize_t)tap.poisoned_count);

    (void)self, (void)ignored;
    for (size_t i = 0; list && i < tap.poisoned_count; i++) {
        const struct poisoned *entry = &tap.poisoned[i];
        PyObject *item = Py_BuildValue("(KIKy#)", (unsigned long long)entry->unique, entry->opcode,
                                       (unsigned long long)entry->nodeid, entry->body,
                                       (Py_ssize_t)entry->len);
        if (item)
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
        else
            Py_CLEAR(list);
    }
    return list;
}

PyObject *py_drain_events(PyObject *self, PyObject *ignored)
{
    struct event *events;
    size_t count;
    PyObject *list;

    (void)self, (void)ignored;
    TAP_LOCK();
    events = tap.events;
    count = tap.event_count;
    if (count) {
        tap.events = NULL;
        tap.event_count = tap.event_room = 0;
    }
    TAP_UNLOCK();
    list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *item = Py_BuildValue("(IKIKK)", events[i].kind, (unsigned long long)events[i].fh,
                                       events[i].mode, (unsigned long long)events[i].offset,
                                       (unsigned long long)events[i].length);
        if (item)
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
        else
            Py_CLEAR(list);
    }
    if (count)
        free(events);
    return list;
}

/* ---- counters ---- */

PyObject *py_watch(PyObject *self, PyObject *args)
{
    unsigned long long nodeid;
    uint64_t *counters, there;
    bool done = true;

    (void)self;
    if (!PyArg_ParseTuple(args, "K", &nodeid))
        return NULL;
    counters = calloc(OP_MAX, sizeof *counters);
    TAP_LOCK();
    if (counters && !map_get(&tap.watched, nodeid, &there)) {
        done = map_put(&tap.watched, nodeid, (uint64_t)(uintptr_t)counters);
        if (done)
            counters = NULL;
    } else {
        done = counters != NULL;
    }
    TAP_UNLOCK();
    free(counters);
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *py_unwatch(PyObject *self, PyObject *args)
{
    unsigned long long nodeid;
    uint64_t counters = 0;

    (void)self;
    if (!PyArg_ParseTuple(args, "K", &nodeid))
        return NULL;
    TAP_LOCK();
    if (!map_take(&tap.watched, nodeid, &counters))
        counters = 0;
    TAP_UNLOCK();
    free((void *)(uintptr_t)counters);
    Py_RETURN_NONE;
}

static PyObject *counters_dict(const uint64_t *counters)
{
    PyObject *dict = PyDict_New();

    for (unsigned opcode = 0; dict && opcode < OP_MAX; opcode++) {
        PyObject *key, *value;

        if (!counters[opcode])
            continue;
        key = PyLong_FromUnsignedLong(opcode);
        value = PyLong_FromUnsignedLongLong(counters[opcode]);
        if (!key || !value || PyDict_SetItem(dict, key, value))
            Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return dict;
}

PyObject *py_counts(PyObject *self, PyObject *args)
{
    PyObject *inode = Py_None;
    unsigned long long nodeid = 0;
    uint64_t copy[OP_MAX] = {0}, counters;

    (void)self;
    if (!PyArg_ParseTuple(args, "|O", &inode))
        return NULL;
    if (inode != Py_None) {
        nodeid = PyLong_AsUnsignedLongLong(inode);
        if (PyErr_Occurred())
            return NULL;
    }
    TAP_LOCK();
    if (inode == Py_None)
        memcpy(copy, tap.counts, sizeof copy);
    else if (map_get(&tap.watched, nodeid, &counters))
        memcpy(copy, (const void *)(uintptr_t)counters, sizeof copy);
    TAP_UNLOCK();
    return counters_dict(copy);
}

PyObject *py_set_budget(PyObject *self, PyObject *args)
{
    unsigned long long fh, nbytes;
    int in_memory;
    bool done;

    (void)self;
    if (!PyArg_ParseTuple(args, "KKp", &fh, &nbytes, &in_memory))
        return NULL;
    TAP_LOCK();
    done = map_put(&tap.budgets, fh, nbytes << 1 | (in_memory ? 1 : 0));
    TAP_UNLOCK();
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *py_left(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    unsigned count;

    (void)self;
    if (!PyArg_ParseTuple(args, "K", &ino))
        return NULL;
    TAP_LOCK();
    count = patience_left(ino) + fallocate_left(ino);
    TAP_UNLOCK();
    return PyLong_FromUnsignedLong(count);
}

PyObject *py_hold(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    uint64_t ignored;
    int on;
    bool done = true;

    (void)self;
    if (!PyArg_ParseTuple(args, "Kp", &ino, &on))
        return NULL;
    TAP_LOCK();
    if (on)
        done = map_put(&tap.held, ino, 1);
    else
        map_take(&tap.held, ino, &ignored);
    TAP_UNLOCK();
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *py_arrived(PyObject *self, PyObject *args)
{
    unsigned long long ino, size, start, end, chunk;
    int fd, in_memory;
    bool done;

    (void)self;
    if (!PyArg_ParseTuple(args, "KipKKKK", &ino, &fd, &in_memory, &size, &start, &end, &chunk))
        return NULL;
    if (chunk < ARRIVAL_BLOCK || start > end || end > size) {
        PyErr_SetString(PyExc_ValueError, "not an extent of the file");
        return NULL;
    }
    TAP_LOCK();
    done = tap_note_arrived(ino, (uint64_t)fd << 1 | (in_memory ? 1 : 0), size,
                            &(struct arrival){start, end, chunk});
    TAP_UNLOCK();
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* The memory stays mapped for as long as the process lives, which is why it is not looked at again. */
PyObject *py_use_close_table(PyObject *self, PyObject *args)
{
    unsigned device;
    Py_buffer view;
    bool done;

    (void)self;
    if (!PyArg_ParseTuple(args, "Iw*", &device, &view))
        return NULL;
    TAP_LOCK();
    done = tap_use_close_table(device, view.buf, (size_t)view.len);
    TAP_UNLOCK();
    if (!done)
        PyBuffer_Release(&view);
    return PyBool_FromLong(done);
}

PyObject *py_set_closing(PyObject *self, PyObject *args)
{
    unsigned long long fh, file;
    unsigned device, slot;
    bool done;

    (void)self;
    if (!PyArg_ParseTuple(args, "KIIK", &fh, &device, &slot, &file))
        return NULL;
    TAP_LOCK();
    done = tap_note_closing(fh, device, slot, file);
    TAP_UNLOCK();
    return PyBool_FromLong(done);
}

PyObject *py_take_back(PyObject *self, PyObject *args)
{
    unsigned long long ino;

    (void)self;
    if (!PyArg_ParseTuple(args, "K", &ino))
        return NULL;
    TAP_LOCK();
    tap_take_back(ino);
    TAP_UNLOCK();
    Py_RETURN_NONE;
}
