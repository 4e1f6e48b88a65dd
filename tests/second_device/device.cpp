// A torch device whose memory is the host's: what an accelerator does to code that was written on a CPU, without one.
//
// - A tensor on it is no CPU tensor: operators that mix devices, or two of its devices, raise. Every other operator runs
//   the CPU's kernel on the same memory.
// - What makes the host wait is told to `on_wait`: reading a value, copying to memory that is not pinned, synchronizing.
// - A copy to pinned memory that does not block arrives only when its event, stream or device is synchronized. Until then
//   the memory reads as bytes of 0xff: NaN, or -1.
// - Its collectives are gloo's, on the same memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>

using at::Tensor;

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 8;
thread_local c10::DeviceIndex current = 0;
std::atomic<bool> refuses_float64{false};

// --- Waiting ---------------------------------------------------------------------------------------------------------

py::object* on_wait = nullptr;  // never freed: the interpreter may be gone before this library

void tell(const std::string& what) {
  if (on_wait == nullptr || on_wait->is_none()) return;
  py::gil_scoped_acquire gil;
  (*on_wait)(what);
}

struct LateCopy {
  int64_t number;
  Tensor source, target;
};
std::mutex late_mutex;
std::deque<LateCopy> late_copies;
int64_t num_copies = 0;

int64_t newest_copy() {
  std::lock_guard<std::mutex> guard(late_mutex);
  return num_copies;
}

void deliver(int64_t up_to) {
  std::deque<LateCopy> due;
  {
    std::lock_guard<std::mutex> guard(late_mutex);
    while (!late_copies.empty() && late_copies.front().number <= up_to) {
      due.push_back(std::move(late_copies.front()));
      late_copies.pop_front();
    }
  }
  at::NoGradGuard no_grad;
  for (auto& copy : due) copy.target.copy_(copy.source);
}

void wait_for_all(const std::string& what) {
  tell(what);
  deliver(newest_copy());
}

// --- Memory ----------------------------------------------------------------------------------------------------------

struct DeviceAllocator final : c10::Allocator {
  static void release(void* pointer) { c10::free_cpu(pointer); }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {pointer, pointer, &release, c10::Device(kDevice, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator);

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned_blocks;

// FSDP2's offloading trusts this: were every pointer called pinned, it would train on stale shards.
bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto block = pinned_blocks.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (block == pinned_blocks.begin()) return false;
  --block;
  return reinterpret_cast<uintptr_t>(pointer) < block->first + std::max<size_t>(block->second, 1);
}

struct PinnedAllocator final : c10::Allocator {
  static void release(void* pointer) {
    if (pointer == nullptr) return;
    {
      std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned_blocks.erase(reinterpret_cast<uintptr_t>(pointer));
    }
    c10::free_cpu(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (pointer != nullptr) {
      std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned_blocks[reinterpret_cast<uintptr_t>(pointer)] = bytes;
    }
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
};
PinnedAllocator pinned_allocator;

// --- The device ------------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return kDevice; }
  Device getDevice() const override { return {kDevice, current}; }
  Device exchangeDevice(Device device) const override {
    Device before(kDevice, current);
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override { current = device.index() < 0 ? current : device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const Stream&) const override { return deliver(newest_copy()), true; }
  void synchronizeStream(const Stream&) const override { wait_for_all("stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_all("device.synchronize"); }
  // An event is the number of the newest copy when it was recorded.
  void record(void** event, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(newest_copy() + 1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override { return deliver(reinterpret_cast<intptr_t>(event) - 1), true; }
  void synchronizeEvent(void* event) const override {
    tell("event.synchronize");
    deliver(reinterpret_cast<intptr_t>(event) - 1);
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  mutable std::vector<at::Generator> generators;
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current, device < 0 ? current : device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    if (generators.empty()) {
      for (int i = 0; i < kNumDevices; i++) generators.push_back(at::make_generator<Generator>(i));
    }
    return generators[index < 0 ? current : index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* storage_impl = storage.unsafeGetStorageImpl();
    c10::OptionalDeviceGuard guard(storage_impl->device());
    auto data = device_allocator.allocate(bytes);
    if (storage_impl->data() && bytes) memcpy(data.get(), storage_impl->data(), std::min(bytes, storage_impl->nbytes()));
    storage_impl->set_data_ptr_noswap(std::move(data));
    storage_impl->set_nbytes(bytes);
  }
};
Hooks hooks;

// --- Operators -------------------------------------------------------------------------------------------------------

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

// The same memory as a CPU tensor.
Tensor on_host(const Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  if (tensor.storage().nbytes() == 0 || tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  auto* data = const_cast<void*>(tensor.const_data_ptr());
  auto host = at::from_blob(data, tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

void check_dtype(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(!refuses_float64 || dtype != c10::kDouble, "this device has no float64");
}

Tensor empty_like_host(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  check_dtype(dtype);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, keys, dtype);
}

Tensor on_device(const Tensor& host, c10::Device device) {
  if (!host.defined()) return host;
  c10::OptionalDeviceGuard guard(device);
  Tensor dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
  Tensor result = empty_like_host(dense.sizes(), dense.strides(), dense.scalar_type());
  on_host(result).copy_(dense);
  return result;
}

// Operators whose result has a size that depends on values: the host has to read it.
const std::set<std::string> kReadOnHost = {
    "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"};

// Runs an operator's CPU kernel on the memory of its arguments.
struct HostCall {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  std::string name = op.schema().name();
  std::optional<c10::Device> device;
  bool has_device_argument = false;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // on the host, on the device
  std::vector<Tensor> host_arguments;

  Tensor enter(const Tensor& tensor) {
    if (is_here(tensor)) {
      TORCH_CHECK(!device || *device == tensor.device(), name, ": tensors on ", *device, " and ", tensor.device());
      device = tensor.device();
      has_device_argument = true;
      pairs.emplace_back(on_host(tensor), tensor);
      return pairs.back().first;
    }
    if (tensor.defined() && tensor.device().type() == c10::kCPU && tensor.dim() > 0) host_arguments.push_back(tensor);
    return tensor;
  }

  Tensor leave(const Tensor& tensor) {
    for (auto& [host, here] : pairs) {
      if (!host.is_same(tensor)) continue;
      if (here.sizes() != tensor.sizes()) here.unsafeGetTensorImpl()->set_sizes_contiguous(tensor.sizes());
      return here;
    }
    return on_device(tensor, *device);
  }

  void convert(c10::IValue& value) {
    if (value.isTensor()) {
      value = enter(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> entered;
      for (Tensor tensor : value.toTensorList()) entered.push_back(enter(tensor));
      value = entered;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> entered;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        entered.push_back(tensor ? std::optional<Tensor>(enter(*tensor)) : tensor);
      }
      value = entered;
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      auto asked = value.toDevice();
      device = c10::Device(kDevice, asked.index() < 0 ? current : asked.index());
      value = c10::IValue(c10::Device(c10::kCPU));
    }
  }

  void run() {
    auto num_arguments = op.schema().arguments().size();
    for (auto value = stack->end() - num_arguments; value != stack->end(); ++value) convert(*value);
    // Indices may be on the host, as on CUDA.
    if (has_device_argument && name.find("index") == std::string::npos) {
      for (auto& tensor : host_arguments) {
        TORCH_CHECK(false, name, ": expected all tensors on ", *device, ", found one on cpu, of size ", tensor.sizes());
      }
    }
    if (!device) device = c10::Device(kDevice, current);
    if (kReadOnHost.count(name)) wait_for_all(name);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    auto num_returns = op.schema().returns().size();
    for (auto value = stack->end() - num_returns; value != stack->end(); ++value) {
      if (value->isTensor()) {
        *value = leave(value->toTensor());
      } else if (value->isTensorList()) {
        c10::List<Tensor> left;
        for (Tensor tensor : value->toTensorList()) left.push_back(leave(tensor));
        *value = left;
      }
    }
  }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  HostCall{op, stack}.run();
}

Tensor empty_memory_format(
    c10::SymIntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  check_dtype(c10::dtype_or_default(dtype));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  return at::detail::empty_generic(shape, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return empty_like_host(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (is_here(source) && target.device().type() == c10::kCPU) {
    if (non_blocking && is_pinned(target.const_data_ptr()) && target.is_non_overlapping_and_dense()) {
      std::lock_guard<std::mutex> guard(late_mutex);
      memset(target.mutable_data_ptr(), 0xff, target.nbytes());
      late_copies.push_back({++num_copies, on_host(source).clone(), target});
      return target;
    }
    wait_for_all(non_blocking ? "copy to pageable memory" : "copy to the host");
  } else if (is_here(target) && source.device().type() == c10::kCPU && source.dim() > 0 && !is_pinned(source.const_data_ptr())) {
    tell("copy from pageable memory");  // which is staged: it costs time, but the host does not wait for the device
  }
  on_host(target).copy_(on_host(source));
  return target;
}

c10::Scalar local_scalar_dense(const Tensor& tensor) {
  wait_for_all("item");
  return on_host(tensor).item();
}

Tensor as_strided(
    const Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}

Tensor view(const Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

Tensor unfold(const Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dim, size, step);
}

const Tensor& resize_(const Tensor& tensor, c10::SymIntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  size_t bytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (bytes > impl->storage().nbytes()) hooks.resizePrivateUse1Bytes(impl->storage(), bytes);
  return tensor;
}

Tensor& set_storage_offset(
    Tensor& tensor, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto start = offset.guard_int(__FILE__, __LINE__);
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage) {
  int64_t numel = storage.nbytes() / tensor.itemsize();
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_contiguous(c10::IntArrayRef(&numel, 1));
  impl->set_storage_offset(0);
  return tensor;
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return tensor;
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  auto host_bias = bias && bias->defined() ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  auto result = at::convolution_symint(
      on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups);
  return on_device(result, input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  c10::SymInt channels = gradient.sym_size(1);
  auto [for_input, for_weight, for_bias] = at::convolution_backward_symint(
      on_host(gradient), on_host(input), on_host(weight), c10::SymIntArrayRef(&channels, 1), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  auto device = input.device();
  return {on_device(for_input, device), on_device(for_weight, device), on_device(for_bias, device)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// --- Collectives -----------------------------------------------------------------------------------------------------

using Tensors = std::vector<Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors hosts;
  for (auto& tensor : tensors) hosts.push_back(on_host(tensor));
  return hosts;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (auto& tensors : lists) hosts.push_back(on_host(tensors));
  return hosts;
}

struct HostBackend : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit HostBackend(c10::intrusive_ptr<c10d::Backend> backend)
      : c10d::Backend(backend->getRank(), backend->getSize()), gloo(std::move(backend)) {}
  const std::string getBackendName() const override { return "hostccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto hosts = on_host(tensors);
    return gloo->allreduce(hosts, options);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto hosts = on_host(tensors);
    return gloo->allreduce_coalesced(hosts, options);
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = on_host(tensors);
    return gloo->broadcast(hosts, options);
  }
  WorkPointer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return gloo->allgather(out, in, options);
  }
  WorkPointer _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto out = on_host(output), in = on_host(input);
    return gloo->_allgather_base(out, in, options);
  }
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = on_host(outputs), in = on_host(inputs);
    return gloo->allgather_into_tensor_coalesced(out, in, options);
  }
  WorkPointer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return gloo->reduce_scatter(out, in, options);
  }
  WorkPointer _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto out = on_host(output), in = on_host(input);
    return gloo->_reduce_scatter_base(out, in, options);
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto out = on_host(outputs), in = on_host(inputs);
    return gloo->reduce_scatter_tensor_coalesced(out, in, options);
  }
  WorkPointer alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto out = on_host(output), in = on_host(input);
    return gloo->alltoall_base(out, in, output_sizes, input_sizes, options);
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return gloo->gather(out, in, options);
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return gloo->scatter(out, in, options);
  }
  WorkPointer send(Tensors& tensors, int target, int tag) override {
    auto hosts = on_host(tensors);
    return gloo->send(hosts, target, tag);
  }
  WorkPointer recv(Tensors& tensors, int source, int tag) override {
    auto hosts = on_host(tensors);
    return gloo->recv(hosts, source, tag);
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions on_cpu;  // without the device, which gloo would refuse
    on_cpu.timeout = options.timeout;
    return gloo->barrier(on_cpu);
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  on_wait = new py::object(py::none());
  m.attr("NUM_DEVICES") = kNumDevices;
  m.def("set_on_wait", [](py::object callback) { *on_wait = std::move(callback); });
  m.def("refuse_float64", [](bool refuse) { refuses_float64 = refuse; });
  m.def("newest_copy", &newest_copy);
  m.def("deliver", &deliver);
  m.def("wait_for_all", &wait_for_all);
  m.def("tell", &tell);
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { current = static_cast<c10::DeviceIndex>(index); });
  m.def("default_generator", [](int index) { return hooks.getDefaultGenerator(index); });
  m.def("backend", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<HostBackend>(std::move(gloo));
  });
}
