// Tensors as the kernels read them, and objects that live in a tensor. Operations are registered by the stable interface of
// PyTorch, whose headers are compiled in a second.
#pragma once
#include <optional>
#include <tuple>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#include "vectors.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

template <class T> static T* numbers(const Tensor& t) { return (T*)t.data_ptr(); }
template <class T> static T* numbers(const Maybe& t) { return t ? numbers<T>(*t) : nullptr; }
static inline bool narrow(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }
static inline int64_t threads() { return torch::stable::get_num_threads(); }
static inline Tensor whole(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
static inline Tensor in_rows(const Tensor& t) {  // the numbers of a row are side by side
    return t.stride(t.dim() - 1) == 1 ? t : torch::stable::contiguous(t);
}
static inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, std::optional<ScalarType> type = std::nullopt) {
    return torch::stable::new_empty(like, sizes, type);
}

static inline void in_large_pages(void* memory, int64_t bytes) {  // of which a core finds many more without a look into tables
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t PAGE = 1 << 21;
    const uintptr_t from = ((uintptr_t)memory + PAGE - 1) / PAGE * PAGE, to = ((uintptr_t)memory + bytes) / PAGE * PAGE;
    if (from < to) madvise((void*)from, to - from, MADV_HUGEPAGE);
#endif
}

// f(a number of the rows' type): float32 or bfloat16.
template <class F> static void by_type(bool narrow_rows, F f) { narrow_rows ? f(bfloat16()) : f(float()); }
static inline ScalarType type_of(bool narrow_rows) { return narrow_rows ? ScalarType::BFloat16 : ScalarType::Float; }

// A tensor of bytes that are an object of type T, which ends with it.
template <class T> static Tensor tensor_of(T* object) {
    const int64_t size = sizeof(T), step = 1;
    return torch::stable::from_blob(object, {&size, 1}, {&step, 1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    ScalarType::Byte, [](void* memory) { delete (T*)memory; });
}
template <class T> static T& object_of(const Tensor& t) {
    STD_TORCH_CHECK(t.numel() == sizeof(T) && t.scalar_type() == ScalarType::Byte, "another object is expected");
    return *numbers<T>(t);
}
