// The arguments of a function of the Python module: numbers, among them addresses.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>

namespace hfq {
namespace {

// The arguments of a call, one after the other.
class Arguments {
 public:
  Arguments(PyObject* const* args, Py_ssize_t count) : args_(args), left_(count) {}

  int64_t number() {
    if (left_ == 0) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too few arguments");
      return 0;
    }
    --left_;
    return PyLong_AsLongLong(*args_++);
  }
  int integer() { return static_cast<int>(number()); }
  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<intptr_t>(number()));
  }
  // Whether all were integers and none is left.
  bool finish() {
    if (PyErr_Occurred()) return false;
    if (left_ == 0) return true;
    PyErr_SetString(PyExc_TypeError, "too many arguments");
    return false;
  }

 private:
  PyObject* const* args_;
  Py_ssize_t left_;
};

PyObject* done(bool ok) {
  if (!ok) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace hfq
