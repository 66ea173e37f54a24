//! The transport between ranks, chosen from `--comm`, the device and the hosts. Never moves data.
use crate::base::{Error, Result};
use crate::comm::env::RankEnv;
use crate::run::settings::{CommName, DeviceName};
use serde::{Deserialize, Serialize};

/// Within a host, CPU ranks always use shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Carrier {
    /// All ranks are on one host.
    Shm,
    /// CPU ranks, TCP between hosts.
    Tcp,
    /// CPU ranks, MPI between hosts.
    Mpi,
    Nccl,
    /// GPU ranks of one host, which copy from each other's memory.
    Ipc,
}

/// A transport within one host, asked for in a job over several.
fn one_host(name: CommName, launched: Option<&RankEnv>) -> Error {
    let (world, local) = launched.map_or((1, 1), |env| (env.world, env.local_world));
    Error::input(format!(
        "--comm {} works within one host, but the job has {world} ranks, {local} of them on this host: remove --comm, or \
         start all ranks on one host",
        name.name()
    ))
}

impl Carrier {
    /// An input error if the name does not fit the device, the build or the hosts.
    pub fn choose(name: CommName, device: DeviceName, launched: Option<&RankEnv>) -> Result<Carrier> {
        if name == CommName::Mpi && !cfg!(feature = "mpi") {
            return Err(Error::input(
                "--comm mpi: this binary was built without MPI. Build it with `cargo build --release --features mpi` \
                (needs \
                 Open MPI and libclang), or remove --comm to use TCP between hosts",
            ));
        }
        let several = launched.is_some_and(|env| env.world != env.local_world);
        match (device, name) {
            (DeviceName::Cuda, CommName::Auto | CommName::Nccl) => Ok(Carrier::Nccl),
            (DeviceName::Cuda, CommName::Ipc) if several => Err(one_host(name, launched)),
            (DeviceName::Cuda, CommName::Ipc) => Ok(Carrier::Ipc),
            (DeviceName::Cuda, CommName::Shm | CommName::Tcp | CommName::Mpi) => Err(Error::input(format!(
                "--comm {} moves data in host memory, but --device cuda uses NCCL: remove --comm",
                name.name()
            ))),
            (_, CommName::Nccl | CommName::Ipc) => Err(Error::input(format!(
                "--comm {} needs --device cuda: remove --comm (CPU ranks use shared memory)",
                name.name()
            ))),
            // TCP and MPI only carry data between hosts.
            _ if !several => Ok(Carrier::Shm),
            (_, CommName::Auto) if cfg!(feature = "mpi") && launched.is_some_and(|env| env.mpi) => Ok(Carrier::Mpi),
            (_, CommName::Auto | CommName::Tcp) => Ok(Carrier::Tcp),
            (_, CommName::Mpi) => Ok(Carrier::Mpi),
            (_, CommName::Shm) => Err(one_host(name, launched)),
        }
    }
    /// "over tcp" for several hosts.
    pub fn between(self) -> &'static str {
        match self {
            Carrier::Shm => "in shared memory",
            Carrier::Tcp => "over tcp",
            Carrier::Mpi => "over mpi",
            Carrier::Nccl => "over nccl",
            Carrier::Ipc => "over ipc",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(world: usize, local_world: usize) -> RankEnv {
        let vars = [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local_world)];
        let get = |name: &str| vars.iter().find(|v| v.0 == name).map(|v| v.1.to_string());
        RankEnv::read(&get).unwrap().unwrap()
    }

    #[test]
    fn hosts_and_devices_decide() {
        let (one, two) = (env(4, 4), env(4, 2));
        let choose = |name, device, env| Carrier::choose(name, device, env);
        for name in [CommName::Auto, CommName::Shm, CommName::Tcp] {
            assert_eq!(choose(name, DeviceName::Cpu, Some(&one)).unwrap(), Carrier::Shm);
            assert_eq!(choose(name, DeviceName::Sim, None).unwrap(), Carrier::Shm);
        }
        assert_eq!(choose(CommName::Auto, DeviceName::Cpu, Some(&two)).unwrap(), Carrier::Tcp);
        assert_eq!(choose(CommName::Tcp, DeviceName::Sim, Some(&two)).unwrap(), Carrier::Tcp);
        assert_eq!(choose(CommName::Auto, DeviceName::Cuda, Some(&two)).unwrap(), Carrier::Nccl);
        let refused = |name, device, env, says: &str| {
            let e = choose(name, device, env).unwrap_err();
            assert!(e.exit_status() == 2 && e.to_string().contains(says), "{e}");
        };
        refused(CommName::Shm, DeviceName::Cpu, Some(&two), "4 ranks, 2 of them on this host");
        refused(CommName::Tcp, DeviceName::Cuda, Some(&two), "--comm tcp moves data in host memory");
        refused(CommName::Nccl, DeviceName::Cpu, Some(&one), "needs --device cuda");
        assert_eq!(choose(CommName::Ipc, DeviceName::Cuda, Some(&one)).unwrap(), Carrier::Ipc);
        refused(CommName::Ipc, DeviceName::Cuda, Some(&two), "--comm ipc works within one host");
        refused(CommName::Ipc, DeviceName::Sim, Some(&one), "--comm ipc needs --device cuda");
        if !cfg!(feature = "mpi") {
            refused(CommName::Mpi, DeviceName::Cpu, Some(&one), "cargo build --release --features mpi");
        }
    }

    #[test]
    #[cfg(feature = "mpi")]
    fn ranks_of_mpirun_use_mpi() {
        let two = RankEnv { mpi: true, ..env(4, 2) };
        assert_eq!(Carrier::choose(CommName::Auto, DeviceName::Cpu, Some(&two)).unwrap(), Carrier::Mpi);
        assert_eq!(Carrier::choose(CommName::Tcp, DeviceName::Cpu, Some(&two)).unwrap(), Carrier::Tcp);
    }
}
