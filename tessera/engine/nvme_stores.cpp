#include "tessera/engine/nvme_stores.h"

#include <random>
#include <sstream>
#include <utility>

#include "tessera/tier/io_measure.h"

namespace tessera::engine {
namespace {

tier::DirectIo direct_io(const Config& config) {
  const std::string& mode = config.get_string("nvme.direct_io");
  return mode == "on"    ? tier::DirectIo::kOn
         : mode == "off" ? tier::DirectIo::kOff
                         : tier::DirectIo::kAuto;
}

tier::IoKind io_kind(const Config& config) {
  const std::string& kind = config.get_string("nvme.engine");
  return kind == "uring"     ? tier::IoKind::kUring
         : kind == "threads" ? tier::IoKind::kThreads
                             : tier::IoKind::kAuto;
}

// What is not given was measured once per directory, by one process; the first one speaks for all.
tier::IoOptions io_options(const Config& config, int num_local_ranks) {
  const auto block_bytes = static_cast<std::size_t>(config.get_bytes("nvme.block_bytes"));
  const auto queue_depth = static_cast<int>(config.get_int("nvme.queue_depth"));
  const auto num_threads = static_cast<int>(config.get_int("nvme.threads"));
  tier::IoOptions options;
  options.kind = io_kind(config);
  if (block_bytes == 0 || queue_depth == 0 || num_threads == 0) {
    tier::MeasureOptions measure;
    measure.kind = options.kind;
    measure.direct = direct_io(config);
    options =
        tier::part_of(tier::measure_directory(config.get_list("nvme.paths").front(), measure).best,
                      num_local_ranks);
    options.kind = io_kind(config);
  }
  options.block_bytes = block_bytes > 0 ? block_bytes : options.block_bytes;
  options.queue_depth = queue_depth > 0 ? queue_depth : options.queue_depth;
  options.num_threads = num_threads > 0 ? num_threads : options.num_threads;
  return options;
}

// Rank 0 chooses: a run has one name on all ranks.
std::string agree_on_run(comm::Group& group) {
  std::uint64_t number = 0;
  if (group.rank() == 0) {
    std::random_device device;
    number = (static_cast<std::uint64_t>(device()) << 32) | device();
  }
  comm::CallOptions call;
  call.label.unit = "name of the run's scratch files";
  group.broadcast_host(&number, sizeof(number), 0, call);
  std::ostringstream name;
  name << std::hex << number;
  return name.str();
}

const char* store_name(Role role) {
  return role == Role::kShard ? "parameters" : role == Role::kGradient ? "gradients" : "states";
}

}  // namespace

NvmeStores::NvmeStores(Runtime& runtime, comm::Group& group) : runtime_(runtime) {
  const Config& config = runtime.config();
  // Rank 0 measures before the broadcast; the others find what it measured.
  tier::IoOptions options;
  if (group.rank() == 0) {
    options = io_options(config, runtime.num_local_ranks());
  }
  run_ = agree_on_run(group);
  if (group.rank() != 0) {
    options = io_options(config, runtime.num_local_ranks());
  }
  io_ = runtime.make_io_engine(options);
  for (const std::string& directory : config.get_list("nvme.paths")) {
    for (const std::string& name : tier::remove_stale(directory)) {
      runtime.logger().info("removed '", name, "', which a run that is no more has left");
    }
  }
  // Another rank may wait for the room that was freed.
  comm::CallOptions call;
  call.label.unit = "scratch files of earlier runs are removed";
  group.start_barrier(call).wait();
}

tier::FileStore& NvmeStores::make_store(Role role, std::int64_t bytes) {
  const Config& config = runtime_.config();
  tier::FileStoreOptions options;
  options.directories = config.get_list("nvme.paths");
  options.name = {run_, runtime_.rank(), store_name(role)};
  options.role = role;
  options.verify = config.get_bool("nvme.verify");
  options.direct_io = direct_io(config);
  options.reserved_bytes = static_cast<std::uint64_t>(bytes);
  options.engine = io_.get();
  options.ledger = &runtime_.ledger();
  of(role).store = std::make_unique<tier::FileStore>(std::move(options));
  of(role).taken = {};
  return *of(role).store;
}

tier::BufferPool& NvmeStores::make_buffers(Role role, Tier tier, std::int64_t bytes) {
  of(role).buffers = std::make_unique<tier::BufferPool>(
      runtime_.device(), tier, static_cast<std::size_t>(bytes),
      role == Role::kGradient ? "gradient buffers" : "optimizer buffers");
  return *of(role).buffers;
}

RoleIo NvmeStores::take_io(Role role) {
  if (store(role) == nullptr) {
    return {};
  }
  const tier::StoreStats stats = store(role)->stats();
  const RoleIo now{stats.read_bytes, stats.written_bytes};
  const RoleIo before = std::exchange(of(role).taken, now);
  return {now.read_bytes - before.read_bytes, now.written_bytes - before.written_bytes};
}

}  // namespace tessera::engine
