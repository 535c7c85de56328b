//! From a path a model wrote to a grant and a path inside it.
//!
//! With one grant its name may be left out; with several it is the first part of the path. A leading `/` or `./`
//! means nothing. `..` is passed on, for the host to refuse.

use tools_sdk::prelude::*;

/// A file or folder that may be there.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// `None` is the list of grants itself.
    grant: Option<String>,
    path: String,
    /// Whether the grant's name is part of the path as shown.
    named: bool,
}

impl Place {
    /// Finds the grant a path means.
    pub(crate) fn find(path: &str) -> Result<Self, ToolError> {
        let grants = files::grants();
        let parts: Vec<&str> =
            path.trim().split('/').filter(|part| !part.is_empty() && *part != ".").collect();
        let first = parts.first().copied().unwrap_or_default();
        let rest = || parts.iter().skip(1).copied().collect::<Vec<_>>().join("/");
        match grants.as_slice() {
            [] => Err(ToolError::new(
                ErrorKind::Denied,
                "no_grant",
                "no folder is granted to this session; the operator grants one",
            )),
            [only] if only.name != first => {
                Ok(Self { grant: Some(only.name.clone()), path: parts.join("/"), named: false })
            }
            [only] => {
                // The grant's own name in front, unless a folder inside really has that name.
                let inside = files::list_directory(&only.name, "")
                    .is_ok_and(|entries| entries.iter().any(|entry| entry.name == first));
                let path = if inside { parts.join("/") } else { rest() };
                Ok(Self { grant: Some(only.name.clone()), path, named: false })
            }
            _ if parts.is_empty() => Ok(Self { grant: None, path: String::new(), named: true }),
            several => match several.iter().find(|grant| grant.name == first) {
                Some(grant) => Ok(Self { grant: Some(grant.name.clone()), path: rest(), named: true }),
                None => {
                    let names: Vec<&str> = several.iter().map(|grant| grant.name.as_str()).collect();
                    let message = format!("a path begins with one of the folders {}", names.join(", "));
                    Err(ToolError::not_found("no_such_folder", message))
                }
            },
        }
    }

    /// The path as the model sees it.
    pub(crate) fn shown(&self) -> String {
        match &self.grant {
            Some(grant) if self.named && self.path.is_empty() => grant.clone(),
            Some(grant) if self.named => format!("{grant}/{}", self.path),
            _ => self.path.clone(),
        }
    }

    /// The granted folder this is in.
    pub(crate) fn whole(&self) -> Self {
        Self { path: String::new(), ..self.clone() }
    }

    /// What is in the folder, in name order.
    pub(crate) fn entries(&self) -> Result<Vec<(Self, files::Entry)>, ToolError> {
        let Some(grant) = &self.grant else {
            return Ok(files::grants()
                .into_iter()
                .map(|grant| {
                    let entry = files::Entry { name: grant.name.clone(), is_directory: true, size: 0 };
                    (Self { grant: Some(grant.name), path: String::new(), named: true }, entry)
                })
                .collect());
        };
        let entries = files::list_directory(grant, &self.path)?;
        Ok(entries
            .into_iter()
            .map(|entry| {
                let path = if self.path.is_empty() {
                    entry.name.clone()
                } else {
                    format!("{}/{}", self.path, entry.name)
                };
                (Self { path, ..self.clone() }, entry)
            })
            .collect())
    }

    /// At most `length` bytes from `offset`.
    pub(crate) fn bytes(&self, offset: u64, length: u32) -> Result<Vec<u8>, ToolError> {
        let Some(grant) = &self.grant else {
            return Err(ToolError::invalid_input("not_a_file", "name a file: the path is empty"));
        };
        if self.path.is_empty() {
            return Err(ToolError::invalid_input("not_a_file", "name a file: the path is a folder"));
        }
        files::read(grant, &self.path, offset, length)
    }
}
