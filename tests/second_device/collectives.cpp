#include "collectives.h"

namespace second_device {

namespace {

using at::Tensor;
using Lists = std::vector<Tensors>;

Tensors hosts_of(const Tensors& tensors) {
  Tensors hosts;
  for (auto& tensor : tensors) hosts.push_back(on_host(tensor));
  return hosts;
}

Lists hosts_of(const Lists& lists) {
  Lists hosts;
  for (auto& tensors : lists) hosts.push_back(hosts_of(tensors));
  return hosts;
}

Tensors flat(const Lists& lists) {
  Tensors all;
  for (auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

std::string sizes_of(const Tensors& tensors) {
  std::string sizes;
  for (auto& tensor : tensors) sizes += c10::str(tensor.scalar_type(), " x ", tensor.numel(), ", ");
  return sizes;
}

// Gloo's work, whose results are tensors of the device.
struct GlooWork final : c10d::Work {
  WorkPointer gloo;
  Tensors outputs;
  GlooWork(WorkPointer work, Tensors outputs) : gloo(std::move(work)), outputs(std::move(outputs)) {}
  bool isCompleted() override { return gloo->isCompleted(); }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  Tensors result() override { return outputs; }
  void synchronize() override { gloo->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override { return gloo->wait(timeout); }
  int sourceRank() const override { return gloo->sourceRank(); }
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

struct AtOnce final : Backend {
  BackendPointer gloo;
  explicit AtOnce(BackendPointer backend)
      : Backend(backend->getRank(), backend->getSize()), gloo(std::move(backend)) {}
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  WorkPointer run(Collective collective) override {
    for (auto& input : collective.inputs) check_is_written(input, collective.name);
    auto work = collective.call(*gloo);
    auto& outputs = collective.outputs;
    if (!outputs.empty() && is_here(outputs[0])) {
      auto moment = issue(outputs[0].device());
      for (auto& output : outputs) set_written(output, moment, collective.name);
    }
    return c10::make_intrusive<GlooWork>(std::move(work), outputs);
  }
};

}  // namespace

BackendPointer at_once(BackendPointer gloo) { return c10::make_intrusive<AtOnce>(std::move(gloo)); }

WorkPointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto call = [hosts = hosts_of(tensors), options](auto& gloo) mutable { return gloo.allreduce(hosts, options); };
  return run({"ALLREDUCE", tensors, tensors, call, options.asyncOp, sizes_of(tensors)});
}

WorkPointer Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto call = [hosts = hosts_of(tensors), options](auto& gloo) mutable {
    return gloo.allreduce_coalesced(hosts, options);
  };
  return run({"ALLREDUCE_COALESCED", tensors, tensors, call, options.asyncOp, sizes_of(tensors)});
}

WorkPointer Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto call = [hosts = hosts_of(tensors), options](auto& gloo) mutable { return gloo.broadcast(hosts, options); };
  return run({"BROADCAST", tensors, tensors, call, options.asyncOp, sizes_of(tensors)});
}

WorkPointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto call = [hosts = hosts_of(tensors), options](auto& gloo) mutable { return gloo.reduce(hosts, options); };
  return run({"REDUCE", tensors, tensors, call, options.asyncOp, sizes_of(tensors)});
}

WorkPointer Backend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto call = [out = hosts_of(outputs), in = hosts_of(inputs), options](auto& gloo) mutable {
    return gloo.allgather(out, in, options);
  };
  return run({"ALLGATHER", inputs, flat(outputs), call, options.asyncOp, sizes_of(flat(outputs))});
}

WorkPointer Backend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  auto call = [out = on_host(output), in = on_host(input), options](auto& gloo) mutable {
    return gloo._allgather_base(out, in, options);
  };
  return run({"_ALLGATHER_BASE", {input}, {output}, call, options.asyncOp, sizes_of({input})});
}

WorkPointer Backend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto call = [out = hosts_of(outputs), in = hosts_of(inputs), options](auto& gloo) mutable {
    return gloo.allgather_into_tensor_coalesced(out, in, options);
  };
  return run({"ALLGATHER_COALESCED", inputs, outputs, call, options.asyncOp, sizes_of(inputs)});
}

WorkPointer Backend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  auto call = [out = hosts_of(outputs), in = hosts_of(inputs), options](auto& gloo) mutable {
    return gloo.reduce_scatter(out, in, options);
  };
  return run({"REDUCE_SCATTER", flat(inputs), outputs, call, options.asyncOp, sizes_of(flat(inputs))});
}

WorkPointer Backend::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  auto call = [out = on_host(output), in = on_host(input), options](auto& gloo) mutable {
    return gloo._reduce_scatter_base(out, in, options);
  };
  return run({"_REDUCE_SCATTER_BASE", {input}, {output}, call, options.asyncOp, sizes_of({input})});
}

WorkPointer Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  auto call = [out = hosts_of(outputs), in = hosts_of(inputs), options](auto& gloo) mutable {
    return gloo.reduce_scatter_tensor_coalesced(out, in, options);
  };
  return run({"REDUCE_SCATTER_TENSOR_COALESCED", inputs, outputs, call, options.asyncOp, sizes_of(inputs)});
}

WorkPointer Backend::alltoall_base(
    Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  auto call = [=, out = on_host(output), in = on_host(input)](auto& gloo) mutable {
    return gloo.alltoall_base(out, in, output_sizes, input_sizes, options);
  };
  return run({"ALLTOALL_BASE", {input}, {output}, call, options.asyncOp});
}

WorkPointer Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto call = [out = hosts_of(outputs), in = hosts_of(inputs), options](auto& gloo) mutable {
    return gloo.gather(out, in, options);
  };
  return run({"GATHER", inputs, flat(outputs), call, options.asyncOp, sizes_of(inputs)});
}

WorkPointer Backend::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  auto call = [out = hosts_of(outputs), in = hosts_of(inputs), options](auto& gloo) mutable {
    return gloo.scatter(out, in, options);
  };
  return run({"SCATTER", flat(inputs), outputs, call, options.asyncOp, sizes_of(outputs)});
}

WorkPointer Backend::send(Tensors& tensors, int target, int tag) {
  auto call = [=, hosts = hosts_of(tensors)](auto& gloo) mutable { return gloo.send(hosts, target, tag); };
  return run({"SEND", tensors, {}, call});
}

WorkPointer Backend::recv(Tensors& tensors, int source, int tag) {
  auto call = [=, hosts = hosts_of(tensors)](auto& gloo) mutable { return gloo.recv(hosts, source, tag); };
  return run({"RECV", {}, tensors, call});
}

WorkPointer Backend::barrier(const c10d::BarrierOptions& options) {
  tell("barrier");
  c10d::BarrierOptions on_cpu;  // without the device, which gloo would refuse
  on_cpu.timeout = options.timeout;
  auto call = [on_cpu](auto& gloo) { return gloo.barrier(on_cpu); };
  return run({"BARRIER", {}, {}, call, options.asyncOp});
}

}  // namespace second_device
