/* Python functions that are not in _tap.c. Needs Python.h and _tap.h before it. */
#ifndef CACHEFS_TAP_PYTHON_H
#define CACHEFS_TAP_PYTHON_H

#pragma GCC visibility push(hidden)
PyObject *py_open_handles(PyObject *self, PyObject *ignored);
PyObject *py_inflight(PyObject *self, PyObject *ignored);
PyObject *py_backings(PyObject *self, PyObject *ignored);
PyObject *py_poisoned(PyObject *self, PyObject *ignored);
PyObject *py_drain_events(PyObject *self, PyObject *ignored);
PyObject *py_set_budget(PyObject *self, PyObject *args);
PyObject *py_hold(PyObject *self, PyObject *args);
PyObject *py_left(PyObject *self, PyObject *args);
PyObject *py_watch(PyObject *self, PyObject *args);
PyObject *py_unwatch(PyObject *self, PyObject *args);
PyObject *py_counts(PyObject *self, PyObject *args);
PyObject *py_small_start(PyObject *self, PyObject *args);
PyObject *py_small_grant(PyObject *self, PyObject *args);
PyObject *py_small_note(PyObject *self, PyObject *args);
PyObject *py_small_revoke(PyObject *self, PyObject *args);
PyObject *py_small_spare(PyObject *self, PyObject *args);
PyObject *py_small_pending(PyObject *self, PyObject *ignored);
PyObject *py_small_folded(PyObject *self, PyObject *ignored);
PyObject *py_small_withhold(PyObject *self, PyObject *args);
PyObject *py_small_info(PyObject *self, PyObject *ignored);
PyObject *py_arrived(PyObject *self, PyObject *args);
PyObject *py_use_close_table(PyObject *self, PyObject *args);
PyObject *py_set_closing(PyObject *self, PyObject *args);
PyObject *py_take_back(PyObject *self, PyObject *args);
#pragma GCC visibility pop

#endif
