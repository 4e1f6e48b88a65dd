// Operators of the second device: each runs the CPU's kernel on the same memory.
//
// Every tensor of the device becomes a CPU tensor over the same memory for the length of a call. What the kernel did to
// those is done to the device's tensors: other sizes and strides, another storage, a storage of another size. Results that
// share memory with an argument do so on the device too; others keep the memory that the kernel has allocated.
#include "device.h"
#include "pending.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>

using at::Tensor;

namespace second_device {

namespace {

// The kernels call operators on CPU tensors, with what is still to come of this call's dispatch: no autograd, no casts.
struct HostOperators {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard without_casts{c10::autocast_dispatch_keyset};
};

// A CPU storage over the memory of one of the device, which it keeps.
c10::Storage host_storage(const c10::Storage& here) {
  auto* impl = here.unsafeGetStorageImpl();
  auto drop = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr data(impl->mutable_data(), new c10::Storage(here), drop, c10::Device(c10::kCPU));
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), here.nbytes(), std::move(data), c10::GetCPUAllocator(), true));
}

c10::Storage device_storage(const c10::Storage& host, c10::Device device) {
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), host.nbytes(), adopt(host, device), allocator(), true));
}

Tensor shaped_like(const Tensor& other, Tensor made) {
  made.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  made._set_conj(other.is_conj());
  made._set_neg(other.is_neg());
  return made;
}

Tensor tensor_like(const Tensor& other, c10::Storage storage, c10::DispatchKey key) {
  return shaped_like(
      other, at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), other.dtype()));
}

// What is a view of a tensor of autograd's is one too, in inference mode as well.
Tensor view_like(const Tensor& other, const Tensor& base) {
  return shaped_like(
      other, at::detail::make_tensor<c10::TensorImpl>(
                 c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), other.dtype()));
}

// Whether an index is a mask, whose number of positions the host has to know.
bool is_mask(const Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == c10::kBool || tensor.scalar_type() == c10::kByte);
}

struct HostCall {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  const c10::FunctionSchema& schema = op.schema();
  std::string name = schema.name().substr(schema.name().find("::") + 2);
  std::optional<c10::Device> device;
  std::string others;  // tensors that are not here
  bool has_device_tensor = false, has_mask = false;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // on the host, here
  std::vector<Tensor> written, host_arguments;
  std::unordered_map<c10::TensorImpl*, size_t> pair_of;                  // by the tensor here
  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_of, here_of;  // storages, by the other one

  bool is_indexing() const { return name == "index" || name.find("index_put") != std::string::npos; }

  c10::Storage to_host(const c10::Storage& here) {
    auto [found, is_new] = hosts_of.try_emplace(here.unsafeGetStorageImpl());
    if (is_new) {
      found->second = host_storage(here);
      here_of[found->second.unsafeGetStorageImpl()] = here;
    }
    return found->second;
  }

  c10::Storage to_device(const c10::Storage& host) {
    auto [found, is_new] = here_of.try_emplace(host.unsafeGetStorageImpl());
    if (is_new) found->second = device_storage(host, *device);
    return found->second;
  }

  void set_device(c10::Device found) {
    TORCH_CHECK(
        !device || *device == found, "Expected all tensors to be on the same device, but ", name, " got ", *device,
        " and ", found);
    device = found;
  }

  Tensor enter(const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    has_mask = has_mask || is_mask(tensor);
    if (!is_here(tensor)) {
      host_arguments.push_back(tensor);
      // Numbers may come from the host, and indices, as on CUDA.
      bool is_taken = !is_written && (tensor.dim() == 0 || is_indexing() || name == "_pack_padded_sequence");
      if (!is_taken) others += " " + tensor.toString() + c10::str(tensor.sizes());
      return tensor;
    }
    set_device(tensor.device());
    has_device_tensor = true;
    if (is_written) written.push_back(tensor);
    auto [found, is_new] = pair_of.try_emplace(tensor.unsafeGetTensorImpl(), pairs.size());
    if (is_new) pairs.emplace_back(tensor_like(tensor, to_host(tensor.storage()), c10::DispatchKey::CPU), tensor);
    return pairs[found->second].first;
  }

  void enter(c10::IValue& value, bool is_written) {
    if (value.isTensor()) {
      value = enter(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> entered;
      for (Tensor tensor : value.toTensorList()) entered.push_back(enter(tensor, is_written));
      value = entered;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> entered;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        entered.push_back(tensor ? std::optional<Tensor>(enter(*tensor, is_written)) : tensor);
      }
      value = entered;
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      set_device(complete(value.toDevice()));
      value = c10::IValue(c10::Device(c10::kCPU));
    } else if (value.isStorage() && value.toStorage().device_type() == kDevice) {
      value = c10::IValue(to_host(value.toStorage()));
    }
  }

  // The CPU's kernels draw from the generator that stands behind the device's.
  void enter_generator(c10::IValue& value, const c10::Argument& argument) {
    if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().type() == kDevice, "Expected a generator of ", *device, " for ", name, ", but found one of ",
          generator.device());
      value = c10::IValue(host_generator(generator));
    } else if (value.isNone() && argument.type()->str() == "Generator?") {
      value = c10::IValue(host_generator(default_generator(device->index())));
    }
  }

  bool reads_values() const {
    if (name == "index" || name == "_index_put_impl_") return has_mask;
    return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  }

  // A view reads nothing: results of functional collectives are viewed before they are waited for.
  bool is_view() const {
    if (schema.returns().empty()) return false;
    auto* alias = schema.returns()[0].alias_info();
    return alias != nullptr && !alias->isWrite();
  }

  void call_on_host(const c10::OperatorHandle& called) {
    DeviceScope scope(*device);
    HostOperators guard;
    try {
      called.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    } catch (const c10::IndexError& error) {
      // An index that only the kernel sees; others the host refuses, before it launches one.
      std::string message = error.what_without_backtrace();
      bool is_in_kernel = message.find("out of bounds") != std::string::npos || message.find("out of range in self") != std::string::npos;
      if (!has_sticky_errors() || !has_device_tensor || !is_in_kernel) throw;
      set_sticky_error("device-side assert triggered (" + message + ")");
      check_sticky_error();
    }
  }

  Tensor leave(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (auto& [host, here] : pairs) {
      if (host.is_same(tensor)) return here;
    }
    for (auto& argument : host_arguments) {
      if (argument.is_same(tensor)) return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == c10::kStrided && !tensor.is_quantized() && !tensor._is_zerotensor(), name,
        " has a result that is not dense");
    for (auto& [host, here] : pairs) {
      if (host.storage().is_alias_of(tensor.storage())) return view_like(tensor, here);
    }
    written.push_back(tensor_like(tensor, to_device(tensor.storage()), c10::DispatchKey::PrivateUse1));
    return written.back();
  }

  void update(const Tensor& host, const Tensor& here) {
    auto* impl = here.unsafeGetTensorImpl();
    impl->_set_conj(host.is_conj());
    impl->_set_neg(host.is_neg());
    auto storage = to_device(host.storage());
    if (!storage.is_alias_of(here.storage())) impl->set_storage_keep_dtype(storage);
    bool is_same = here.sizes() == host.sizes() && here.strides() == host.strides();
    if (is_same && here.storage_offset() == host.storage_offset()) return;
    impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  // A kernel that has resized a storage has given it memory of its own.
  void update_storages() {
    for (auto& [here_impl, host] : hosts_of) {
      auto* host_impl = host.unsafeGetStorageImpl();
      if (host_impl->data() == here_impl->data() && host.nbytes() == here_impl->nbytes()) continue;
      here_impl->set_data_ptr_noswap(adopt(host, here_impl->device()));
      here_impl->set_nbytes(host.nbytes());
    }
  }

  // Without such an argument the kernel would draw from the CPU's own generator.
  bool has_generator() const {
    auto is_one = [](const c10::Argument& argument) { return argument.type()->str() == "Generator?"; };
    return std::any_of(schema.arguments().begin(), schema.arguments().end(), is_one);
  }

  // `other` is called in place of the operator, with the same arguments.
  void run(const c10::OperatorHandle* other = nullptr) {
    auto& arguments = schema.arguments();
    auto first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto* alias = arguments[i].alias_info();
      enter((*stack)[first + i], alias != nullptr && alias->isWrite());
    }
    TORCH_CHECK(
        !has_device_tensor || others.empty(), "Expected all tensors to be on the same device, but ", name, " got ",
        device ? device->str() : "", " and cpu:", others);
    if (!device) device = complete(c10::Device(kDevice));
    TORCH_CHECK_NOT_IMPLEMENTED(
        !op.hasTag(at::Tag::nondeterministic_seeded) || has_generator(), schema, " draws random numbers of the CPU");
    for (size_t i = 0; i < arguments.size(); i++) enter_generator((*stack)[first + i], arguments[i]);
    std::vector<c10::IValue> launched(stack->end() - arguments.size(), stack->end());
    if (!is_view()) {
      for (auto& pair : pairs) check_is_written(pair.second, name);
      before_kernel(*device);
    }
    if (reads_values()) wait_for_stream(name == "_local_scalar_dense" ? "item" : name, *device);
    call_on_host(other ? *other : op);

    update_storages();
    for (auto& [host, here] : pairs) update(host, here);
    auto num_returns = schema.returns().size();
    for (auto value = stack->end() - num_returns; value != stack->end(); ++value) {
      if (value->isTensor()) {
        *value = leave(value->toTensor());
      } else if (value->isTensorList()) {
        c10::List<Tensor> left;
        for (Tensor tensor : value->toTensorList()) left.push_back(leave(tensor));
        *value = left;
      }
    }
    auto moment = issue(*device);
    for (auto& tensor : written) set_written(tensor, moment, name);
    if (!written.empty()) tell_kernels(name, launched);
  }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.schema().name().find("c10d") == std::string::npos, op.schema(), " has no kernel here");
  HostCall{op, stack}.run();
}

Tensor empty_memory_format(
    c10::SymIntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  DeviceScope scope(device.value_or(c10::Device(kDevice)));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  return at::detail::empty_generic(shape, allocator(), keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  DeviceScope scope(device.value_or(c10::Device(kDevice)));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), allocator(), keys,
      c10::dtype_or_default(dtype));
}

void copy_to_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  check_is_written(source, "copy");
  bool is_plain = target.is_non_overlapping_and_dense() && !target.is_conj() && !target.is_neg();
  bool is_late = non_blocking && is_pinned(target.const_data_ptr()) && is_plain;
  if (!is_late) {
    wait_for_stream(non_blocking ? "copy to pageable memory" : "copy to the host", source.device());
    on_host(target).copy_(on_host(source));
    return;
  }
  before_kernel(source.device());
  auto values = at::empty_strided(target.sizes(), target.strides(), target.options().pinned_memory(false));
  values.copy_(on_host(source).expand(target.sizes()));
  copy_late(source, target, values);
}

void copy_to_device(const Tensor& source, const Tensor& target, bool non_blocking) {
  bool is_on_host = !is_here(source);
  if (is_on_host && is_pinned(source.const_data_ptr())) deliver_to_device(source, target.device());
  if (is_on_host && !non_blocking) wait_for_stream("copy from the host", target.device());
  // Staged: it costs time, but the host does not wait for the device.
  if (is_on_host && non_blocking && !is_pinned(source.const_data_ptr())) tell("copy from pageable memory");
  if (!is_on_host) check_is_written(source, "copy");
  before_kernel(target.device());
  on_host(target).copy_(on_host(source));
  set_written(target, issue(target.device()), "copy");
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  tell_kernels("copy", {});
  HostOperators guard;
  (is_here(target) ? copy_to_device : copy_to_host)(source, target, non_blocking);
  return target;
}

// As for CUDA: `tensor.data = tensor.to(device)`, which `Module.to` and FSDP2 do.
bool has_compatible_shallow_copy_type(const Tensor& tensor, const Tensor& other) {
  return tensor.layout() == c10::kStrided && other.layout() == c10::kStrided;
}

void record_stream_of(Tensor& tensor, c10::Stream) { record_stream(tensor.storage().data_ptr()); }

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(c10::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

void convolution(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static auto on_cpu = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  HostCall{op, stack}.run(&on_cpu);
}

void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static auto on_cpu = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto first = stack->end() - (on_cpu.schema().arguments().size() - 1);
  std::vector<int64_t> bias_sizes{first->toTensor().size(1)};
  stack->insert(first + 3, c10::IValue(bias_sizes));
  HostCall{on_cpu, stack}.run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// device.py registers the casts.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// Copies heed lazy conjugation and negation; these keys would resolve them by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("conj_physical_", torch::CppFunction::makeFromBoxedFunction<&fallback>());  // else composite, without a kernel
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("record_stream", &record_stream_of);
  m.impl("native_dropout", &native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { HostCall{op, stack}.run(); }

Tensor on_host(const Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  return tensor_like(tensor, host_storage(tensor.storage()), c10::DispatchKey::CPU);
}

}  // namespace second_device
