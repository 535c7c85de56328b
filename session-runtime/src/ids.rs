//! Identifiers: a prefix that says what the thing is, and a UUIDv7, so that ids sort by creation.

use uuid::Uuid;

/// Makes a fresh id such as `sess_0198…`.
pub fn fresh(prefix: &str) -> String {
    format!("{prefix}_{}", Uuid::now_v7().simple())
}

/// Whether `id` could have been made by [`fresh`] with this prefix, or is a client's own name of the
/// same alphabet: at most 64 characters of `[A-Za-z0-9_.-]`.
pub fn is_valid(id: &str) -> bool {
    !id.is_empty()
        && id.len() <= 64
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_by_creation_and_are_valid() {
        let ids: Vec<String> = (0..64).map(|_| fresh("sess")).collect();
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(ids.iter().all(|id| is_valid(id) && id.starts_with("sess_")));
    }

    #[test]
    fn names_that_could_be_paths_are_refused() {
        for bad in ["", "../x", "a/b", "a b", &"x".repeat(65)] {
            assert!(!is_valid(bad), "{bad:?}");
        }
    }
}
