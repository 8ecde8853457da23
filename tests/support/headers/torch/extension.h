// What DeepSpeed's operators use of torch/extension.h: tensors and their Python type. Without the
// rest of torch's C++ interface they compile in two thirds of the time.
#pragma once
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
