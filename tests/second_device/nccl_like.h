// Collectives that behave as NCCL's. nccl_like.py says what that means, and where it is known from.
#pragma once

#include "collectives.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>

namespace second_device {

struct Communicator;
struct Job;
using JobPointer = std::shared_ptr<Job>;

// `split_group` copies them.
struct NcclLikeOptions final : c10d::Backend::Options {
  using Options::Options;
};

class NcclLike final : public Backend {
 public:
  using StorePointer = c10::intrusive_ptr<c10d::Store>;
  using Connect = std::function<BackendPointer(const StorePointer&, int rank, int size)>;

  // `connect` makes a gloo backend that never times out. It blocks until all ranks have come; null if one is lost.
  NcclLike(Connect connect, StorePointer store, int rank, int size, std::chrono::milliseconds timeout);
  ~NcclLike() override;  // aborts

  WorkPointer run(Collective collective) override;
  void abort() override;
  void shutdown() override;
  void setTimeout(std::chrono::milliseconds timeout) override;

  bool supportsSplitting() const override { return true; }
  void eagerConnectSingleDevice(at::Device device) override;
  BackendPointer split(
      const StorePointer& store, const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& options) override;
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

 private:
  void connect_all();
  JobPointer queue(Collective collective, c10::DeviceIndex device, bool is_watched);

  Connect connect_;
  StorePointer store_;
  std::shared_ptr<Communicator> communicator_;
  std::map<c10::DeviceIndex, Stream> streams_;  // of asynchronous collectives
};

}  // namespace second_device
