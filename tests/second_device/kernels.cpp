// Counts the kernels that operators launch, as CUDA would: those that write something, views not.
//
// Operators on lists launch one kernel where CUDA has a fast path, else one for each tensor: the lists must hold tensors
// of one dtype, and a number in a tensor must have that dtype too (`can_use_fast_route` in ATen/native/ForeachUtils.h,
// `foreach_tensor_mul_tensor_kernel_cuda_` in ATen/native/cuda/ForeachBinaryOpScalarTensor.cu). Long lists are split
// into several launches on a GPU, which is not counted.
#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace second_device {

namespace {

py::object* on_kernel = nullptr;  // never freed: the interpreter may be gone before this library

// Lists that may mix dtypes on the fast path: a copy converts.
bool converts(const std::string& name) { return name.find("_foreach_copy") != std::string::npos; }

int64_t num_kernels(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  if (name.find("_foreach_") != 0) return 1;
  auto first = arguments[0].toTensorVector();
  if (first.empty()) return 0;
  bool is_fast = true;
  auto is_alike = [&](const at::Tensor& tensor) { return tensor.scalar_type() == first[0].scalar_type(); };
  for (auto& argument : arguments) {
    if (argument.isTensor()) is_fast &= is_alike(argument.toTensor());
    if (!argument.isTensorList() || converts(name)) continue;
    for (auto& tensor : argument.toTensorVector()) is_fast &= is_alike(tensor);
  }
  return is_fast ? 1 : static_cast<int64_t>(first.size());
}

}  // namespace

void tell_kernels(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  if (on_kernel == nullptr) return;
  py::gil_scoped_acquire gil;
  if (!on_kernel->is_none()) (*on_kernel)(name, num_kernels(name, arguments));
}

void set_on_kernel(py::object callback) {
  if (on_kernel == nullptr) on_kernel = new py::object();
  *on_kernel = std::move(callback);
}

namespace {

void on_lists(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { run_on_host(op, stack); }

// Without kernels of its own, a device gets an operator on lists as one operator for each tensor.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.find("aten::_foreach_") != 0) continue;
    auto overload = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    m.impl(overload.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_lists>());
  }
}

}  // namespace

}  // namespace second_device
