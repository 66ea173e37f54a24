//! Each launcher's variables, read as ranks or refused by name. Never reads this process's own environment.
use super::*;

fn read(vars: &[(&str, &str)]) -> Result<Option<RankEnv>> {
    RankEnv::read(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
}
fn ranks(env: RankEnv) -> [usize; 4] {
    [env.rank, env.world, env.local_rank, env.local_world]
}
const AGENT: [(&str, &str); 6] = [
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "node7"),
    ("MASTER_PORT", "29400"),
];
const MPI: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_SIZE", "3"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
    ("PMIX_NAMESPACE", "prterun-1"),
];
/// The environment of a task of srun.
const SLURM: [(&str, &str); 7] = [
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NNODES", "2"),
    ("SLURM_JOB_ID", "77"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NUM_TASKS", "4"),
];
/// The environment of a batch script.
const BATCH: [(&str, &str); 6] = [
    ("SLURM_PROCID", "0"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NNODES", "1"),
    ("SLURM_JOB_ID", "77"),
    ("SLURM_TASK_PID", "4711"),
];

#[test]
fn each_launcher_is_understood() {
    assert_eq!(read(&[]).unwrap(), None);
    let env = read(&AGENT).unwrap().unwrap();
    assert_eq!((env.master_addr.as_str(), env.master_port, env.arena_fd), ("node7", 29400, None));
    assert_eq!(ranks(env), [5, 8, 1, 4]);
    let env = read(&MPI).unwrap().unwrap();
    assert_eq!((env.master_addr.as_str(), env.run_id.as_str()), ("127.0.0.1", "mpi prterun-1 "));
    assert_eq!(ranks(env), [2, 3, 2, 3]);
    assert_eq!(read(&SLURM).unwrap().unwrap().master_addr, ""); // two hosts without a node list
    assert_eq!(ranks(read(&SLURM).unwrap().unwrap()), [3, 4, 1, 2]);
}

#[test]
fn slurms_first_node_is_the_master_unless_one_is_given() {
    let with = |more: &[(&str, &str)]| read(&[&SLURM[..], more].concat());
    let addr = |more: &[(&str, &str)]| with(more).unwrap().unwrap().master_addr;
    let job = ("SLURM_JOB_NODELIST", "node[08-11]");
    assert_eq!(addr(&[job]), "node08");
    assert_eq!(addr(&[job, ("SLURM_STEP_NODELIST", "node[10-11]")]), "node10");
    assert_eq!(addr(&[job, ("MASTER_ADDR", "10.0.0.3")]), "10.0.0.3");
    let one =
        [("SLURM_STEP_ID", "3"), ("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", "1"), job];
    assert_eq!(read(&one).unwrap().unwrap().master_addr, "127.0.0.1");
    let e = with(&[("SLURM_JOB_NODELIST", "node[1-")]).unwrap_err();
    assert_eq!(e.exit_status(), 2);
    assert!(e.to_string().contains("SLURM_JOB_NODELIST=node[1- is not a node list; set MASTER_ADDR"), "{e}");
    // Under mpirun rank 0 may be anywhere in the allocation.
    let mpi = [("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")];
    let mpi = [&mpi[..], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2"), job]].concat();
    assert_eq!(read(&mpi).unwrap().unwrap().master_addr, "");
}

/// Variables of `launcher` with these numbers, by its first names or its last.
fn says(launcher: &LauncherNames, last: bool, ranks: [usize; 4]) -> Vec<(&'static str, String)> {
    let name = |names: &[&'static str]| if last { names[names.len() - 1] } else { names[0] };
    let names = [launcher.rank, launcher.world, launcher.local_rank, launcher.local_world].map(name);
    names.into_iter().zip(ranks.map(|n| n.to_string())).collect()
}
fn read_all(vars: &[(&str, String)]) -> Result<Option<RankEnv>> {
    read(&vars.iter().map(|(name, value)| (*name, value.as_str())).collect::<Vec<_>>())
}
const IN_ORDER: [&LauncherNames; 5] = [&TORCHRUN, &OPEN_MPI, &MVAPICH, &PMI, &JSM];

#[test]
fn launchers_go_before_each_other_in_the_documented_order() {
    // Each launcher gives another number of ranks; Slurm, the last, says 4.
    let mut all: Vec<_> = SLURM.map(|(name, value)| (name, value.to_string())).into();
    assert_eq!(read_all(&all).unwrap().unwrap().world, 4);
    for (world, launcher) in (10..).zip(IN_ORDER.into_iter().rev()) {
        all.extend(says(launcher, false, [3, world, 3, world]));
        let env = read_all(&all).unwrap().unwrap();
        assert_eq!((env.world, env.mpi), (world, launcher.mpi), "{}", launcher.name);
    }
}

#[test]
fn each_name_of_a_launcher_is_read() {
    for launcher in IN_ORDER {
        for last in [false, true] {
            let mut vars = says(launcher, last, [5, 8, 1, 4]);
            vars.push(("MASTER_ADDR", "node7".into()));
            let env = read_all(&vars).unwrap().unwrap();
            assert_eq!((ranks(env.clone()), env.master_addr.as_str()), ([5, 8, 1, 4], "node7"), "{}", launcher.name);
            // Several hosts without rank 0's address: refused by name when ranks are to meet.
            vars.pop();
            assert_eq!(read_all(&vars).unwrap().unwrap().master_addr, "", "{}", launcher.name);
        }
        let e = read_all(&says(launcher, false, [5, 8, 1, 4])[..1]).unwrap_err();
        assert!(
            e.to_string().contains(&format!("{} is set but {} is not", launcher.rank[0], launcher.world[0])),
            "{e}"
        );
    }
}

#[test]
fn slurm_that_speaks_pmi_is_slurm_and_hydra_under_slurm_is_hydra() {
    let pmi2 = [&SLURM[..], &[("PMI_RANK", "3"), ("PMI_SIZE", "4")]].concat();
    let env = read(&pmi2).unwrap().unwrap();
    assert_eq!((ranks(env.clone()), env.mpi), ([3, 4, 1, 2], true));
    // In a shell of one task, a plain start launches its own ranks.
    let one =
        [("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_PROCID", "0"), ("PMI_RANK", "0"), ("PMI_SIZE", "1")];
    assert_eq!(read(&one).unwrap(), None);
    assert_eq!(read(&[&one[..], &[("SLURM_NTASKS", "4"), ("SLURM_STEP_NUM_TASKS", "1")]].concat()).unwrap(), None);
    let hydra = [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")];
    assert_eq!(ranks(read(&[&SLURM[..], &hydra].concat()).unwrap().unwrap()), [3, 4, 0, 1]);
}

#[test]
fn a_lone_rank_of_pmix_is_refused_by_name() {
    let e = read(&[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "x")]).unwrap_err();
    assert!(e.exit_status() == 2 && e.to_string().contains("PMIX_RANK=1 is set"), "{e}");
    let slurm = [("PMIX_RANK", "0"), ("SLURM_JOB_ID", "77"), ("SLURM_NTASKS", "1"), ("SLURM_PROCID", "0")];
    assert_eq!(read(&slurm).unwrap(), None);
    assert!(read(&[&SLURM[..], &[("PMIX_RANK", "3")]].concat()).unwrap().unwrap().mpi);
}

#[test]
fn local_numbers_that_are_missing_are_completed_found_or_refused() {
    let two = [("RANK", "1"), ("WORLD_SIZE", "2")];
    let with = |more: &[(&str, &str)]| read(&[&two[..], more].concat());
    // On one host or two, ranks exchange host names at MASTER_ADDR; without it they cannot.
    let at = ("MASTER_ADDR", "node1");
    assert_eq!(ranks(with(&[at]).unwrap().unwrap()), [1, 2, UNKNOWN, UNKNOWN]);
    assert_eq!(ranks(with(&[at, ("LOCAL_RANK", "1")]).unwrap().unwrap()), [1, 2, 1, UNKNOWN]);
    let e = with(&[("LOCAL_RANK", "1")]).unwrap_err();
    let says = "RANK is set, but neither LOCAL_WORLD_SIZE nor MASTER_ADDR is";
    assert!(e.exit_status() == 2 && e.to_string().contains(says), "{e}");
    let e = read(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]).unwrap_err();
    assert!(e.to_string().contains("PMI_RANK is set, but neither MPI_LOCALNRANKS"), "{e}");
    // With both, there is no ambiguity.
    assert_eq!(ranks(with(&[("LOCAL_WORLD_SIZE", "2")]).unwrap().unwrap()), [1, 2, 1, 2]);
    assert_eq!(ranks(with(&[("LOCAL_WORLD_SIZE", "1")]).unwrap().unwrap()), [1, 2, 0, 1]);
    assert_eq!(ranks(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().unwrap()), [0, 1, 0, 1]);
}

#[test]
fn what_a_batch_script_exports_for_all_ranks_agrees_with_the_launcher() {
    let with = |world| read(&[&SLURM[..], &[("WORLD_SIZE", world), ("MASTER_ADDR", "node1")]].concat());
    assert_eq!(ranks(with("4").unwrap().unwrap()), [3, 4, 1, 2]);
    let e = with("8").unwrap_err();
    assert!(e.to_string().contains("WORLD_SIZE=8 contradicts the launcher's own variables, which give 4"), "{e}");
}

/// Batch scripts, and the shells of salloc: with the ids of their steps or without, on the allocation's first host or
/// where salloc ran.
#[test]
fn a_shell_inside_an_allocation_is_no_rank() {
    let interactive = [("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_STEP_NUM_NODES", "1")];
    let shells = [
        (BATCH.to_vec(), Some((2, 1))),
        ([&BATCH[..], &interactive].concat(), Some((2, 1))),
        ([&BATCH[..], &[("SLURM_STEP_ID", "4294967291")]].concat(), Some((2, 1))),
        ([&BATCH[..], &[("SLURM_STEP_ID", "batch")]].concat(), Some((2, 1))),
        ([&[("SLURM_JOB_NUM_NODES", "3")], &BATCH[..]].concat(), Some((2, 3))),
        (vec![("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "77")], Some((4, 1))),
        // Nothing that srun would add.
        (vec![("SLURM_NTASKS", "1"), ("SLURM_PROCID", "0"), ("SLURM_JOB_ID", "77")], None),
        ([&[("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "1")], &BATCH[..]].concat(), None),
        (vec![], None),
    ];
    for (vars, job) in shells {
        assert_eq!(read(&vars).unwrap(), None, "{vars:?}");
        let shell = SlurmShell::read(&|name| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_string()));
        assert_eq!(shell.map(|shell| (shell.tasks, shell.hosts)), job, "{vars:?}");
    }
    assert_eq!(ranks(read(&[&MPI[..], &BATCH].concat()).unwrap().unwrap()), [2, 3, 2, 3]);
}

/// In a step that is smaller than its job, srun --preserve-env leaves the job's numbers in the older names.
#[test]
fn a_steps_own_numbers_count() {
    let step = [("SLURM_STEP_ID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_NUM_NODES", "1")];
    let job = [("SLURM_NTASKS", "8"), ("SLURM_NNODES", "4"), ("SLURM_PROCID", "1"), ("SLURM_LOCALID", "1")];
    assert_eq!(ranks(read(&[&step[..], &job].concat()).unwrap().unwrap()), [1, 2, 1, 2]);
}

#[test]
fn half_set_malformed_and_contradicting_variables_are_named() {
    let message = |vars: &[(&str, &str)]| {
        let e = read(vars).unwrap_err();
        assert_eq!(e.exit_status(), 2);
        e.to_string()
    };
    let text = message(&[("RANK", "0")]);
    assert!(text.contains("RANK is set but WORLD_SIZE is not"), "{text}");
    let text = message(&[("RANK", "0"), ("WORLD_SIZE", "two"), ("LOCAL_RANK", "0")]);
    assert!(text.contains("WORLD_SIZE=two is not a number"), "{text}");
    for addr in ["node7:29500", "tcp://node7", "node 7"] {
        let text = message(&[&AGENT[..4], &[("MASTER_ADDR", addr)]].concat());
        assert!(text.contains(&format!("MASTER_ADDR={addr} is neither")), "{text}");
    }
    let text = message(&[("OMPI_COMM_WORLD_SIZE", "2")]);
    assert!(text.contains("OMPI_COMM_WORLD_RANK"), "{text}");
    let text = message(&[("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")]);
    assert!(text.contains("rank 2 of 2"), "{text}");
    let text = message(&[("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_PROCID", "0")]);
    assert!(text.contains("SLURM_LOCALID"), "{text}");
}
