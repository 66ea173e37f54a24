//! Slurm's compressed host lists: `node[001-003,7],other`. Only the first host is needed, so nothing is expanded.

/// The first host of a list: `node001` of `node[001-003,7],other`, `rack1n04` of `rack[1-2]n[04,08]`. `None` if the
/// list is empty or its brackets do not match.
pub(super) fn first(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list.trim();
    while let Some(at) = rest.find([',', '[', ']']) {
        name += &rest[..at];
        let (mark, after) = rest[at..].split_at(1);
        match mark {
            "[" => {
                let (inside, behind) = after.split_once(']')?;
                let number = inside.split([',', '-']).next()?;
                if number.is_empty() || inside.contains('[') {
                    return None;
                }
                name += number;
                rest = behind;
            }
            "," => return (!name.is_empty()).then_some(name),
            _ => return None,
        }
    }
    name += rest;
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::first;

    #[test]
    fn the_first_host_of_each_form() {
        for (list, expected) in [
            ("node7", "node7"),
            ("node1,node2", "node1"),
            ("node[001-003,7],other", "node001"),
            ("node[7,001-003]", "node7"),
            ("other,node[1-3]", "other"),
            ("rack[1-2]n[04,08]-ib,x", "rack1n04-ib"),
            ("gpu-a[09-10].cluster.org", "gpu-a09.cluster.org"),
            (" node[3]\n", "node3"),
        ] {
            assert_eq!(first(list).as_deref(), Some(expected), "{list}");
        }
    }

    #[test]
    fn what_is_no_list_has_no_first() {
        for list in ["", "  ", ",node1", "node[1-3", "node]1", "node[]", "node[-3]", "node[1,[2]]"] {
            assert_eq!(first(list), None, "{list}");
        }
    }
}
