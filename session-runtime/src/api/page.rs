//! Lists in the shape of the OpenAI cursor page, which stock clients page through on their own.

use serde::{Deserialize, Serialize};

use super::problem::Problem;

/// One page of a list.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Page<T: utoipa::ToSchema> {
    /// Always `list`.
    object: &'static str,
    data: Vec<T>,
    /// Cursor of the first item.
    first_id: Option<String>,
    /// Cursor of the last item: the next page's `after`.
    last_id: Option<String>,
    has_more: bool,
}

impl<T: utoipa::ToSchema> Page<T> {
    /// A page whose items are named by `id`.
    pub(super) fn new(data: Vec<T>, has_more: bool, id: impl Fn(&T) -> String) -> Self {
        let first_id = data.first().map(&id);
        let last_id = data.last().map(&id);
        Self { object: "list", data, first_id, last_id, has_more }
    }

    /// Everything there is.
    pub(super) fn whole(data: Vec<T>, id: impl Fn(&T) -> String) -> Self {
        Self::new(data, false, id)
    }
}

/// Order of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Order {
    /// Oldest first.
    Asc,
    /// Newest first.
    #[default]
    Desc,
}

/// The window of `items` (oldest first) after the item named `after`.
pub(super) fn window<T: utoipa::ToSchema>(
    mut items: Vec<T>,
    order: Order,
    after: Option<&str>,
    limit: usize,
    id: impl Fn(&T) -> String,
) -> Result<Page<T>, Problem> {
    if order == Order::Desc {
        items.reverse();
    }
    if let Some(after) = after {
        let place = items.iter().position(|item| id(item) == after).ok_or_else(|| {
            Problem::invalid("after", format!("'after' names '{after}', which is not in this list"))
        })?;
        items.drain(..=place);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    Ok(Page::new(items, has_more, id))
}

/// `limit` of a query within 1..=`most`.
pub(super) fn limit(given: Option<u32>, default: u32, most: u32) -> Result<usize, Problem> {
    match given.unwrap_or(default) {
        limit if (1..=most).contains(&limit) => Ok(limit as usize),
        limit => Err(Problem::invalid("limit", format!("'limit' is {limit}; it must be from 1 to {most}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(page: &Page<String>) -> Vec<&str> {
        page.data.iter().map(String::as_str).collect()
    }

    #[test]
    fn pages_cover_a_list_without_gap_or_overlap() {
        let items: Vec<String> = (0..7).map(|number| format!("i{number}")).collect();
        for order in [Order::Asc, Order::Desc] {
            let mut seen = Vec::new();
            let mut after: Option<String> = None;
            loop {
                let page = window(items.clone(), order, after.as_deref(), 3, String::clone).unwrap();
                seen.extend(ids(&page).into_iter().map(str::to_owned));
                after = page.last_id.clone();
                if !page.has_more {
                    break;
                }
            }
            if order == Order::Desc {
                seen.reverse();
            }
            assert_eq!(seen, items);
        }
    }

    #[test]
    fn a_cursor_that_is_not_in_the_list_is_refused() {
        let problem = window(vec!["a".to_owned()], Order::Asc, Some("b"), 1, String::clone).unwrap_err();
        assert_eq!(problem.param.as_deref(), Some("after"));
        assert!(limit(Some(0), 10, 100).is_err() && limit(Some(101), 10, 100).is_err());
        assert_eq!(limit(None, 10, 100).ok(), Some(10));
    }
}
