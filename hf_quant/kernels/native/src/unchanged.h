// Whether what blocks were made from is in its place: asked before each token, for all layers of a model.

#pragma once

#include <cstdint>
#include <cstring>

#include "arguments.h"

namespace hfq {

inline void prefetch(const void* address) {
#if defined(__GNUC__)
  __builtin_prefetch(address);
#endif
}

// `aoti_torch_get_data_ptr` of torch's stable interface, null if it was not found. `tensor` is the address of the pointer
// to torch's tensor.
using DataPointer = int32_t (*)(void* tensor, void** data);

inline DataPointer data_pointer = nullptr;

inline PyObject* read_tensors_by(PyObject*, PyObject* address) {
  const long long value = PyLong_AsLongLong(address);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  data_pointer = reinterpret_cast<DataPointer>(static_cast<intptr_t>(value));
  Py_RETURN_NONE;
}

// One place of `unchanged`, see there.
struct Place {
  PyObject *entries, *numbers, *empty;
  const char *tensors, *addresses;
  Py_ssize_t tensor_bytes, address_bytes;
};

inline bool read_bytes(PyObject* bytes, const char*& begin, Py_ssize_t& size) {
  char* found;
  if (PyBytes_AsStringAndSize(bytes, &found, &size) < 0) return false;
  begin = found;
  size -= size % sizeof(void*);
  return true;
}

inline bool read_place(PyObject* tuple, Place& place) {
  PyObject** parts[] = {&place.entries, &place.numbers, &place.empty};
  if (PyTuple_Size(tuple) != 5) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "takes tuples of five parts");
    return false;
  }
  for (int i = 0; i < 3; ++i) {
    *parts[i] = PyTuple_GetItem(tuple, i);
    if (PyTuple_Size(*parts[i]) < 0) return false;
  }
  return read_bytes(PyTuple_GetItem(tuple, 3), place.tensors, place.tensor_bytes) &&
         read_bytes(PyTuple_GetItem(tuple, 4), place.addresses, place.address_bytes);
}

inline void* word_at(const char* bytes) {
  void* word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Asks for all that a check of a place reads. Between two tokens it has left the caches of the CPU, and one miss after
// the other takes longer than the check.
inline void prefetch_place(const Place& place) {
  for (Py_ssize_t i = 0; i < place.address_bytes; i += sizeof(void*)) prefetch(word_at(place.addresses + i));
}

// Asks for the tables of a place's dicts, whose heads have come. Where the heads have these pointers is not promised: a
// wrong guess costs a prefetch.
inline void prefetch_tables(const Place& place) {
  const void* before = nullptr;
  for (Py_ssize_t i = 0; i + 2 < PyTuple_Size(place.entries); i += 3) {
    const void* dict = PyTuple_GetItem(place.entries, i);
    if (dict == before) continue;
    before = dict;
    const char* table = static_cast<const char*>(word_at(static_cast<const char*>(dict) + 4 * sizeof(void*)));
    prefetch(table);
    prefetch(table + 64);
    prefetch(table + 128);
  }
}

// 1: a place is unchanged, 0: it is not, -1: error.
inline int check_place(const Place& place) {
  for (Py_ssize_t i = 0; i + 2 < PyTuple_Size(place.entries); i += 3) {
    PyObject* found = PyDict_GetItemWithError(PyTuple_GetItem(place.entries, i), PyTuple_GetItem(place.entries, i + 1));
    if (found == nullptr && PyErr_Occurred()) return -1;
    if ((found == nullptr ? Py_None : found) != PyTuple_GetItem(place.entries, i + 2)) return 0;
  }
  for (Py_ssize_t i = 0; i + 1 < PyTuple_Size(place.numbers); i += 2) {
    PyObject* found = PyObject_CallObject(PyTuple_GetItem(place.numbers, i), nullptr);
    if (found == nullptr) return -1;
    const long long number = PyLong_AsLongLong(found);
    const long long expected = PyLong_AsLongLong(PyTuple_GetItem(place.numbers, i + 1));
    Py_DecRef(found);
    if (PyErr_Occurred()) return -1;
    if (number != expected) return 0;
  }
  for (Py_ssize_t i = 0; i + 2 * static_cast<Py_ssize_t>(sizeof(void*)) <= place.tensor_bytes; i += 2 * sizeof(void*)) {
    void* found;
    if (data_pointer == nullptr || data_pointer(word_at(place.tensors + i), &found) != 0) return 0;
    if (found != word_at(place.tensors + i + sizeof(void*))) return 0;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(place.empty); ++i) {
    const Py_ssize_t size = PyObject_Size(PyTuple_GetItem(place.empty, i));
    if (size != 0) return size < 0 ? -1 : 0;
  }
  return 1;
}

// Whether what blocks were made from is in its place. For each block: tuples of (dict, key, value or None for none), of
// (function that returns a number, the number), of dicts that must be empty, the bytes of (address of the pointer to a
// tensor, address of its data), and those of addresses that are worth a prefetch.
inline PyObject* unchanged(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Place place{}, next{}, after{};
  for (Py_ssize_t i = -2; i < count; ++i) {
    if (i + 2 < count) {
      if (!read_place(args[i + 2], after)) return nullptr;
      prefetch_place(after);
    }
    if (i >= -1 && i + 1 < count) prefetch_tables(next);
    const int found = i < 0 ? 1 : check_place(place);
    if (found < 0) return nullptr;
    if (found == 0) Py_RETURN_FALSE;
    place = next;
    next = after;
  }
  Py_RETURN_TRUE;
}

}  // namespace hfq
