"""A content that is too large for the model, told in part and read on page by page.

Theory. A content is one text: text itself, or a JSON document in compact form. A page is one stretch of it. Of a
document the stretch lies inside of lists, objects or one long string; what stands around it is put around it again, so
that each page is a document too, and small values beside the stretch (a cursor, totals) are on every page of it. The
stretches of all pages, one after another, are the whole: nothing is missing and nothing comes twice.

Where a page begins is worked out once, as offsets into the text (an index). A page is then a few slices of bytes,
wherever they are kept.

Four files, each standing on those before it: `splitting` makes the index; `content` is a content with its index, and
the form in which it is kept; `page` is what a reader gets; `telling` is what the model is told of a content at first:
its first pages, or an overview, with the handle under which the rest is.

House rules. Pure. Offsets count bytes of UTF-8. A page is never empty and never larger than its room. No message holds
anything of a content or of a handle that was asked for.

Not here: how a value becomes text (bounds), where contents are kept and for whom (store).
"""

from towerman.pages.content import Content, ResultStore, Unreadable, is_handle, new_handle
from towerman.pages.page import Page, page_of
from towerman.pages.splitting import LEAST_ROOM, Frame, Index, Stretch, index_of
from towerman.pages.telling import Told, again, begun, page_room, summary_room, summed_up

__all__ = [
    "LEAST_ROOM",
    "Content",
    "Frame",
    "Index",
    "Page",
    "ResultStore",
    "Stretch",
    "Told",
    "Unreadable",
    "again",
    "begun",
    "index_of",
    "is_handle",
    "new_handle",
    "page_of",
    "page_room",
    "summary_room",
    "summed_up",
]
