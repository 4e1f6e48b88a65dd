// Collectives of the second device, which are gloo's on the same memory; and what Python sees of the device.
#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace second_device {

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

py::object* on_wait = nullptr;  // never freed: the interpreter may be gone before this library

Tensors on_host(const Tensors& tensors) {
  Tensors hosts;
  for (auto& tensor : tensors) hosts.push_back(second_device::on_host(tensor));
  return hosts;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (auto& tensors : lists) hosts.push_back(on_host(tensors));
  return hosts;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

// Gloo's work, whose results are tensors of the device.
struct Work final : c10d::Work {
  WorkPointer gloo;
  Tensors outputs;
  Work(WorkPointer work, Tensors outputs) : gloo(std::move(work)), outputs(std::move(outputs)) {}
  bool isCompleted() override { return gloo->isCompleted(); }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  Tensors result() override { return outputs; }
  void synchronize() override { gloo->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override { return gloo->wait(timeout); }
  void abort() override { gloo->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    std::vector<c10::Device> devices;
    if (!outputs.empty()) devices.push_back(outputs[0].device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    gloo->getFuture()->addCallback([future, outputs = outputs](c10::ivalue::Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
      } else {
        future->markCompleted(c10::IValue(outputs));
      }
    });
    return future;
  }
};

WorkPointer give(WorkPointer work, const Tensors& outputs) {
  if (!outputs.empty() && is_here(outputs[0])) {
    auto moment = issue(outputs[0].device());
    for (auto& output : outputs) set_written(output, moment, "a collective");
  }
  return c10::make_intrusive<Work>(std::move(work), outputs);
}

void check(const Tensors& inputs, const char* name) {
  for (auto& input : inputs) check_is_written(input, name);
}

struct Backend final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit Backend(c10::intrusive_ptr<c10d::Backend> backend)
      : c10d::Backend(backend->getRank(), backend->getSize()), gloo(std::move(backend)) {}
  const std::string getBackendName() const override { return "hostccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check(tensors, "allreduce");
    auto hosts = on_host(tensors);
    return give(gloo->allreduce(hosts, options), tensors);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check(tensors, "allreduce_coalesced");
    auto hosts = on_host(tensors);
    return give(gloo->allreduce_coalesced(hosts, options), tensors);
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check(tensors, "broadcast");
    auto hosts = on_host(tensors);
    return give(gloo->broadcast(hosts, options), tensors);
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check(tensors, "reduce");
    auto hosts = on_host(tensors);
    return give(gloo->reduce(hosts, options), tensors);
  }
  WorkPointer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    check(inputs, "allgather");
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return give(gloo->allgather(out, in, options), flat(outputs));
  }
  WorkPointer _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    check({input}, "_allgather_base");
    auto out = second_device::on_host(output), in = second_device::on_host(input);
    return give(gloo->_allgather_base(out, in, options), {output});
  }
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    check(inputs, "allgather_into_tensor_coalesced");
    auto out = on_host(outputs), in = on_host(inputs);
    return give(gloo->allgather_into_tensor_coalesced(out, in, options), outputs);
  }
  WorkPointer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    check(flat(inputs), "reduce_scatter");
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return give(gloo->reduce_scatter(out, in, options), outputs);
  }
  WorkPointer _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check({input}, "_reduce_scatter_base");
    auto out = second_device::on_host(output), in = second_device::on_host(input);
    return give(gloo->_reduce_scatter_base(out, in, options), {output});
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    check(inputs, "reduce_scatter_tensor_coalesced");
    auto out = on_host(outputs), in = on_host(inputs);
    return give(gloo->reduce_scatter_tensor_coalesced(out, in, options), outputs);
  }
  WorkPointer alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    check({input}, "alltoall_base");
    auto out = second_device::on_host(output), in = second_device::on_host(input);
    return give(gloo->alltoall_base(out, in, output_sizes, input_sizes, options), {output});
  }
  WorkPointer gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    check(inputs, "gather");
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return give(gloo->gather(out, in, options), flat(outputs));
  }
  WorkPointer scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    check(flat(inputs), "scatter");
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return give(gloo->scatter(out, in, options), outputs);
  }
  WorkPointer send(Tensors& tensors, int target, int tag) override {
    check(tensors, "send");
    auto hosts = on_host(tensors);
    return gloo->send(hosts, target, tag);
  }
  WorkPointer recv(Tensors& tensors, int source, int tag) override {
    auto hosts = on_host(tensors);
    auto moment = issue(tensors[0].device());
    for (auto& tensor : tensors) set_written(tensor, moment, "recv");
    return gloo->recv(hosts, source, tag);
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    tell("barrier");
    c10d::BarrierOptions on_cpu;  // without the device, which gloo would refuse
    on_cpu.timeout = options.timeout;
    return gloo->barrier(on_cpu);
  }
};

}  // namespace

void set_on_kernel(py::object callback);  // kernels.cpp

void tell(const std::string& what) {
  if (on_wait == nullptr) return;
  py::gil_scoped_acquire gil;
  if (!on_wait->is_none()) (*on_wait)(what);
}

}  // namespace second_device

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace second_device;
  register_hooks();
  on_wait = new py::object(py::none());
  m.attr("NUM_DEVICES") = kNumDevices;
  m.def("set_on_wait", [](py::object callback) { *on_wait = std::move(callback); });
  m.def("set_on_kernel", &set_on_kernel);
  m.def("refuse_float64", &refuse_float64);
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int index) { set_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("synchronize", [](int index) {
    py::gil_scoped_release no_gil;
    wait_for_device("device.synchronize", static_cast<c10::DeviceIndex>(index));
  });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("backend", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Backend>(std::move(gloo));
  });
}
