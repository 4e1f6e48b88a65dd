// What the files of the second device share. device.cpp: memory, streams and copies; operators.cpp: operators;
// pending.cpp: what the device has yet to do; collectives.cpp: collectives on gloo, at once; nccl_like.cpp: collectives
// that behave as NCCL's; bindings.cpp: what Python sees.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace second_device {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 8;

using Lock = std::unique_lock<std::mutex>;

inline bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex index);
c10::Device complete(c10::Device device);  // with the current device's index if it has none

struct DeviceScope {
  c10::DeviceIndex before = current_device();
  explicit DeviceScope(c10::Device device) { set_device(complete(device).index()); }
  ~DeviceScope() { set_device(before); }
};

using Stream = std::pair<c10::DeviceIndex, c10::StreamId>;
using Clock = std::map<Stream, int64_t>;  // how much of each stream's work

// One piece of work of a stream: the how manieth it is there.
struct Moment {
  Stream stream;
  int64_t number = 0;
};
Moment issue(c10::Device device);  // on the device's current stream

Stream current_stream(c10::DeviceIndex device);
Stream new_stream(c10::DeviceIndex device);
Clock clock_of(const Stream& stream);  // what it and the host have done and waited for
Moment issue_after(const Stream& stream, const Stream& before);  // on `stream`, which waits for all of `before`
void let_stream_wait(const Stream& stream, const Moment& moment);

// Memory that a stream writes must not be read by one that has not waited for it.
void check_is_written(const at::Tensor& tensor, const std::string& reader);
void set_written(const at::Tensor& tensor, Moment moment, const std::string& writer);
void record_stream(const c10::DataPtr& pointer);

c10::Allocator* allocator();
// A storage of the device over the memory of one on the host, which it keeps.
c10::DataPtr adopt(const c10::Storage& host, c10::Device device);
bool is_pinned(const void* pointer);
at::Generator default_generator(c10::DeviceIndex index);
at::Generator host_generator(const at::Generator& generator);  // the one that draws the device's numbers

// Copies to pinned memory arrive when the host or the device has waited for them.
void copy_late(const at::Tensor& source, const at::Tensor& target, const at::Tensor& values);
void deliver_to_device(const at::Tensor& pinned, c10::Device device);

// What makes the host wait tells so.
void tell(const std::string& what);
void wait_for_stream(const std::string& what, c10::Device device);
void wait_for_device(const std::string& what, c10::DeviceIndex device);

// Runs an operator of the device on the CPU (operators.cpp).
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// What launches kernels on a GPU tells so (kernels.cpp).
void tell_kernels(const std::string& name, c10::ArrayRef<c10::IValue> arguments);

// The same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& tensor);

void register_hooks();

}  // namespace second_device
