#include "tessera/comm/rendezvous.h"

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/launch/launcher.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Source = RendezvousSource;

Environment merged(Environment env, const Environment& more) {
  for (const auto& [name, value] : more) env[name] = value;
  return env;
}

const Environment kTorchrun{{"RANK", "3"},           {"WORLD_SIZE", "8"},
                            {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "2"},
                            {"MASTER_ADDR", "head"}, {"MASTER_PORT", "29501"}};
const Environment kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                           {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Environment kMpich{
    {"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "3"}};
const Environment kSrun{{"SLURM_PROCID", "5"},
                        {"SLURM_NTASKS", "9"},
                        {"SLURM_LOCALID", "1"},
                        {"SLURM_NODEID", "1"},
                        {"SLURM_STEP_ID", "0"},
                        {"SLURM_JOB_ID", "4711"},
                        {"SLURM_STEP_TASKS_PER_NODE", "4(x2),1"},
                        {"SLURM_STEP_NODELIST", "n[01-03]"}};
const Environment kTessera{{"TESSERA_RANK", "1"},
                           {"TESSERA_WORLD_SIZE", "2"},
                           {"TESSERA_STORE_HOST", "127.0.0.1"},
                           {"TESSERA_STORE_PORT", "40001"}};

struct Found {
  const char* name;
  Environment env;
  Rendezvous expected;
};

std::vector<Found> found_cases() {
  return {
      {"nothing", {}, {}},
      {"tessera", kTessera, {Source::kTessera, 1, 2, 1, 2, "127.0.0.1", 40001, false, "tessera/"}},
      {"tessera inside torchrun's environment",
       merged(kTessera, {{"RANK", "0"}, {"WORLD_SIZE", "1"}}),
       {Source::kTessera, 1, 2, 1, 2, "127.0.0.1", 40001, false, "tessera/"}},
      {"torchrun, static store",
       kTorchrun,
       {Source::kTorchrun, 3, 8, 1, 2, "head", 29501, false, "tessera/"}},
      {"torchrun, rank 0 serves",
       merged(kTorchrun, {{"RANK", "0"}, {"LOCAL_RANK", "0"}}),
       {Source::kTorchrun, 0, 8, 0, 2, "head", 29501, true, "tessera/"}},
      {"torchrun's agent serves",
       merged(kTorchrun, {{"RANK", "0"},
                          {"LOCAL_RANK", "0"},
                          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                          {"TORCHELASTIC_RESTART_COUNT", "2"}}),
       {Source::kTorchrun, 0, 8, 0, 2, "head", 29501, false, "tessera/2/"}},
      {"torchrun with one rank needs no address",
       {{"RANK", "0"}, {"WORLD_SIZE", "1"}},
       {Source::kTorchrun, 0, 1, 0, 1, "", 0, false, "tessera/"}},
      {"by hand on one host",
       {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}},
       {Source::kTorchrun, 1, 2, 1, 2, "localhost", 1, false, "tessera/"}},
      {"by hand on several hosts",
       {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "head"}, {"MASTER_PORT", "65535"}},
       {Source::kTorchrun, 1, 2, 0, 1, "head", 65535, false, "tessera/"}},
      {"torchrun inside srun",
       merged(kSrun, kTorchrun),
       {Source::kTorchrun, 3, 8, 1, 2, "head", 29501, false, "tessera/"}},
      {"open mpi on one host",
       kOpenMpi,
       {Source::kMpi, 1, 4, 1, 4, "127.0.0.1", 29500, false, "tessera/"}},
      {"open mpi, told the address",
       merged(
           kOpenMpi,
           {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"MASTER_ADDR", "head"}, {"MASTER_PORT", "7000"}}),
       {Source::kMpi, 1, 4, 1, 2, "head", 7000, false, "tessera/"}},
      {"open mpi inside an allocation, where Slurm numbers mpirun's helpers",
       merged(kSrun, kOpenMpi),
       {Source::kMpi, 1, 4, 1, 4, "127.0.0.1", 0, false, "tessera/"}},
      {"mpich on one host",
       kMpich,
       {Source::kMpi, 2, 3, 2, 3, "127.0.0.1", 29500, false, "tessera/"}},
      {"mpich, one rank",
       {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}},
       {Source::kMpi, 0, 1, 0, 1, "", 0, false, "tessera/"}},
      {"mpich without local ranks, told a local address",
       {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}},
       {Source::kMpi, 1, 2, 1, 2, "127.0.0.1", 29500, false, "tessera/"}},
      {"srun", kSrun, {Source::kSlurm, 5, 9, 1, 4, "n01", 0, false, "tessera/"}},
      {"srun, last node",
       merged(kSrun, {{"SLURM_PROCID", "8"}, {"SLURM_NODEID", "2"}, {"SLURM_LOCALID", "0"}}),
       {Source::kSlurm, 8, 9, 0, 1, "n01", 0, false, "tessera/"}},
      {"srun, told the address",
       merged(kSrun, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "7000"}}),
       {Source::kSlurm, 5, 9, 1, 4, "head", 7000, false, "tessera/"}},
      {"srun with PMI",
       merged(kSrun, {{"PMI_RANK", "5"}, {"PMI_SIZE", "9"}}),
       {Source::kSlurm, 5, 9, 1, 4, "n01", 0, false, "tessera/"}},
      {"srun with PMIx",
       merged(kSrun, {{"PMIX_RANK", "5"}}),
       {Source::kSlurm, 5, 9, 1, 4, "n01", 0, false, "tessera/"}},
      {"srun on one node, without counts per node",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_LOCALID", "1"},
        {"SLURM_NNODES", "1"},
        {"SLURM_JOB_ID", "1"},
        {"SLURM_JOB_NODELIST", "gpu5"}},
       {Source::kSlurm, 1, 2, 1, 2, "gpu5", 0, false, "tessera/"}},
      {"a step of one task inside a large allocation",
       merged(kSrun, {{"SLURM_PROCID", "0"},
                      {"SLURM_LOCALID", "0"},
                      {"SLURM_STEP_NUM_TASKS", "1"},
                      {"SLURM_NODEID", "0"},
                      {"SLURM_STEP_TASKS_PER_NODE", "1"}}),
       {Source::kSlurm, 0, 1, 0, 1, "", 0, false, "tessera/"}},
      {"an allocation without srun", {{"SLURM_NTASKS", "9"}, {"SLURM_JOB_ID", "1"}}, {}},
      {"a batch script",
       {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "9"}, {"ENVIRONMENT", "BATCH"}},
       {}},
      {"an interactive step",
       {{"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "9"},
        {"SLURM_STEP_ID", "4294967290"},
        {"PMIX_RANK", "0"}},
       {}},
      {"variables that are set to nothing", {{"RANK", ""}, {"WORLD_SIZE", ""}}, {}},
  };
}

TEST(Rendezvous, IsFoundInTheVariablesOfEveryLauncher) {
  for (const Found& item : found_cases()) {
    SCOPED_TRACE(item.name);
    const Rendezvous found = find_rendezvous(item.env);
    EXPECT_EQ(found.source, item.expected.source);
    EXPECT_EQ(found.rank, item.expected.rank);
    EXPECT_EQ(found.world_size, item.expected.world_size);
    EXPECT_EQ(found.local_rank, item.expected.local_rank);
    EXPECT_EQ(found.local_world_size, item.expected.local_world_size);
    EXPECT_EQ(found.host, item.expected.host);
    EXPECT_EQ(found.serves_store, item.expected.serves_store);
    EXPECT_EQ(found.key_prefix, item.expected.key_prefix);
    // A derived port has a test of its own.
    if (item.expected.port != 0 || item.expected.world_size == 1) {
      EXPECT_EQ(found.port, item.expected.port);
    }
  }
}

TEST(Rendezvous, DerivesOnePortPerSlurmStepBelowTheEphemeralOnes) {
  std::set<std::uint16_t> ports;
  for (const char* job : {"4711", "4712"}) {
    for (const char* step : {"0", "1"}) {
      const Environment rank0 = merged(kSrun, {{"SLURM_JOB_ID", job}, {"SLURM_STEP_ID", step}});
      const Environment rank8 =
          merged(rank0, {{"SLURM_PROCID", "8"}, {"SLURM_NODEID", "2"}, {"SLURM_LOCALID", "0"}});
      const std::uint16_t port = find_rendezvous(rank0).port;
      EXPECT_EQ(port, find_rendezvous(rank8).port);
      EXPECT_GE(port, 1024);
      EXPECT_LT(port, 32768);
      ports.insert(port);
    }
  }
  EXPECT_EQ(ports.size(), 4U);
}

TEST(Rendezvous, DerivesThePortOfAnMpiJobFromItsName) {
  const auto port_of = [](const char* name) {
    return find_rendezvous(merged(kOpenMpi, {{"PMIX_NAMESPACE", name}})).port;
  };
  EXPECT_EQ(port_of("prterun-head-77@1"), port_of("prterun-head-77@1"));
  EXPECT_NE(port_of("prterun-head-77@1"), port_of("prterun-head-78@1"));
}

struct Refused {
  Environment env;
  std::vector<const char*> said;  // all of these
};

TEST(Rendezvous, RefusesHalfASetAndNamesVariableValueAndRemedy) {
  const std::vector<Refused> cases{
      {{{"RANK", "3"}}, {"RANK=3", "WORLD_SIZE is not", "torchrun"}},
      {{{"WORLD_SIZE", "3"}}, {"WORLD_SIZE=3", "RANK is not", "torchrun"}},
      {merged(kTorchrun, {{"MASTER_ADDR", ""}}), {"WORLD_SIZE=8", "MASTER_ADDR is not", "rank 0"}},
      {merged(kTorchrun, {{"MASTER_PORT", ""}}), {"WORLD_SIZE=8", "MASTER_PORT is not"}},
      {merged(kTorchrun, {{"LOCAL_WORLD_SIZE", ""}}), {"LOCAL_RANK=1", "LOCAL_WORLD_SIZE is not"}},
      {merged(kTorchrun, {{"RANK", "8"}}), {"RANK=8", "WORLD_SIZE=8", "from 0 to 7"}},
      {merged(kTorchrun, {{"RANK", "-1"}}), {"RANK=-1", "out of range"}},
      {merged(kTorchrun, {{"RANK", "three"}}), {"RANK='three'", "not a whole number"}},
      {merged(kTorchrun, {{"RANK", "3x"}}), {"RANK='3x'", "not a whole number"}},
      {merged(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE=0", "out of range"}},
      {merged(kTorchrun, {{"WORLD_SIZE", "99999999999999999999"}}),
       {"WORLD_SIZE=", "out of range"}},
      {merged(kTorchrun, {{"MASTER_PORT", "65536"}}), {"MASTER_PORT=65536", "1 to 65535"}},
      {merged(kTorchrun, {{"MASTER_PORT", "0"}}), {"MASTER_PORT=0", "1 to 65535"}},
      {merged(kTorchrun, {{"LOCAL_RANK", "2"}}), {"LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"}},
      {merged(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), {"9 ranks on this host", "only 8"}},
      {merged(kTessera, {{"TESSERA_STORE_PORT", ""}}), {"TESSERA_STORE_PORT is not", "unset"}},
      {merged(kTessera, {{"TESSERA_WORLD_SIZE", ""}}), {"TESSERA_WORLD_SIZE is not", "unset"}},
      {merged(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", ""}}), {"OMPI_COMM_WORLD_SIZE is not", "mpirun"}},
      {merged(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
       {"4 ranks", "2 of them", "export MASTER_ADDR"}},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, {"2 ranks", "export MASTER_ADDR"}},
      {{{"PMIX_RANK", "2"}}, {"PMIX_RANK=2", "how many ranks", "WORLD_SIZE"}},
      {merged(kSrun, {{"SLURM_PROCID", "9"}}), {"SLURM_PROCID=9", "SLURM_NTASKS=9"}},
      {merged(kSrun, {{"SLURM_NTASKS", ""}}), {"SLURM_PROCID=5", "SLURM_NTASKS is not", "srun"}},
      {merged(kSrun, {{"SLURM_STEP_NODELIST", ""}}), {"MASTER_ADDR"}},
      {merged(kSrun, {{"SLURM_STEP_NODELIST", "n[1-"}}), {"host list 'n[1-'"}},
      {merged(kSrun, {{"SLURM_JOB_ID", ""}}), {"SLURM_JOB_ID", "MASTER_PORT"}},
      {merged(kSrun, {{"SLURM_NODEID", "3"}}), {"SLURM_NODEID=3", "3 nodes"}},
      {merged(kSrun, {{"SLURM_LOCALID", "4"}}), {"SLURM_LOCALID=4", "SLURM_STEP_TASKS_PER_NODE"}},
  };
  for (const Refused& item : cases) {
    try {
      find_rendezvous(item.env);
      ADD_FAILURE() << "taken, though it should say " << item.said.front();
    } catch (const ConfigError& error) {
      for (const char* text : item.said) {
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
            << "'" << text << "' is missing in: " << error.what();
      }
    }
  }
}

TEST(Rendezvous, OfAnotherLauncherForbidsRanksOfOurOwn) {
  for (const Environment& env : {kTorchrun, kOpenMpi, kSrun, kTessera}) {
    EXPECT_THROW(cli::check_no_rendezvous(env), ConfigError);
  }
  try {
    cli::check_no_rendezvous(kTorchrun);
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "--ranks starts ranks of its own, but this process is already rank 3 of 8, "
                 "started by torchrun; leave --ranks out, or start the program without torchrun");
  }
}

TEST(Rendezvous, OfAWorldOfOneAllowsRanksOfOurOwn) {
  EXPECT_NO_THROW(cli::check_no_rendezvous({}));
  EXPECT_NO_THROW(cli::check_no_rendezvous({{"RANK", "0"}, {"WORLD_SIZE", "1"}}));
  EXPECT_NO_THROW(cli::check_no_rendezvous({{"SLURM_NTASKS", "9"}}));
}

TEST(Rendezvous, PutsTheSecretOfARunBeforeItsKeys) {
  Environment env = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}};
  const Rendezvous without = find_rendezvous(env);
  EXPECT_FALSE(without.has_secret);
  EXPECT_NE(trust_warning(without).find("10.0.0.1:29500"), std::string::npos);
  env["TESSERA_RUN_SECRET"] = "abc";
  const Rendezvous with = find_rendezvous(env);
  EXPECT_EQ(with.key_prefix, key_prefix_with(without.key_prefix, "abc"));
  EXPECT_NE(with.key_prefix, without.key_prefix);
  EXPECT_EQ(trust_warning(with), "");
  env.erase("TESSERA_RUN_SECRET");
  env["MASTER_ADDR"] = "127.0.0.1";
  EXPECT_EQ(trust_warning(find_rendezvous(env)), "") << "nobody else reaches it";
}

TEST(Rendezvous, ReadsTheEnvironmentOfTheProcess) {
  setenv("TESSERA_TEST_VARIABLE", "a=b", 1);
  EXPECT_EQ(process_environment().at("TESSERA_TEST_VARIABLE"), "a=b");
  unsetenv("TESSERA_TEST_VARIABLE");
}

}  // namespace
}  // namespace tessera::comm
