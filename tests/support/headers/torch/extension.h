// What DeepSpeed's operators use of torch/extension.h: tensors, some of their functions, and their
// Python type. Without the rest of torch's C++ interface they compile in half of the time.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}
