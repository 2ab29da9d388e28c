"""The console page that shows and changes who writes to Placement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django import forms
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import device_actions
from accelerators.models import Host
from accelerators.ui import badges
from accelerators.ui.explained_admin import ExplainedModelAdmin, Rights
from accelerators.ui.permissions import Right
from accelerators.ui.refusals import RefusalAsMessage
from placement_sync.jobs import writer_election
from placement_sync.models import Writer

if TYPE_CHECKING:
    WriterModelForm = forms.ModelForm[Writer]
else:  # at run time Django's class takes no type parameter
    WriterModelForm = forms.ModelForm

CHANGE_WRITER = Right("cyborg:placement_writer:update", "placement_sync.change_writer")
MAX_SHOWN = 100
"""Largest number of hosts that are listed because their agent cannot write. If the same wrong credentials cause it on
all hosts, a longer list adds nothing.
"""


class WriterForm(WriterModelForm):
    """The form that selects who writes to Placement, the conductor or the agents, with an optional reason.

    The reason is empty at first: the stored one belongs to the last change.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the form with an empty reason."""
        super().__init__(*args, **kwargs)
        if "reason" in self.fields:
            self.initial["reason"] = ""

    class Meta:
        model = Writer
        fields = ("who", "reason")
        help_texts = {
            "who": "Agents write for their own hosts where they can; the conductor writes for all others.",
            "reason": "Shown here and in the event.",
        }


class WriterAdmin(RefusalAsMessage, ExplainedModelAdmin):
    """The page of the single writer row. Users with the right `CHANGE_WRITER` may change it."""

    form = WriterForm
    fields = ("who", "reason", "shown_since", "shown_unable")
    readonly_fields = ("shown_since", "shown_unable")
    rights: ClassVar[Rights] = {"add": None, "delete": None, "change": (CHANGE_WRITER,)}
    change_form_before_template = "console/read_only_reason.html"

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Writer | None:
        """Return the current writer, also while no row exists; None for any id other than 1."""
        return writer_election.get_writer() if object_id == "1" else None

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Redirect to the page of the single row."""
        return HttpResponseRedirect(reverse("admin:placement_sync_writer_change", args=[1]))

    def save_model(self, request: HttpRequest, obj: Writer, form: forms.ModelForm[Writer], change: bool) -> None:
        """Switch the writer, with its event, instead of saving the row.

        Nothing happens if the chosen one is the writer already. Raises RefusedError INVALID for an unusable reason.
        """
        actor = device_actions.get_caller(request).name
        writer_election.switch_writer(form.cleaned_data["who"], actor, form.cleaned_data["reason"])

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show or save the form, under a title of its own and without the buttons that a single row does not need.

        A refusal becomes a message on the page.
        """
        context = {"title": "Who writes to Placement", "show_save_and_continue": False, "show_delete": False}
        return super().changeform_view(request, object_id, form_url, context | (extra_context or {}))

    @display(description="Now")
    def shown_since(self, writer: Writer) -> SafeString | str:
        """Render the current writer, with its epoch, and when, by whom and why it was made the writer."""
        active = writer_election.get_writer()
        if not active.epoch:
            return "conductor, since the beginning (epoch 0)"
        why = f": {active.reason}" if active.reason else ""
        return format_html(
            "{} (epoch {}), changed {} by {}{}",
            active.who,
            active.epoch,
            badges.render_relative_time(active.since),
            active.by,
            why,
        )

    @display(description="Hosts whose agent cannot write, so the conductor writes")
    def shown_unable(self, writer: Writer) -> SafeString | str:
        """Render a table of at most MAX_SHOWN hosts whose agent cannot write, with the reasons; "none" if all can.

        Hosts without an agent are among them.
        """
        unable = writer_election.list_hosts_without_writer(Host.objects.order_by("name"))
        rows = format_html_join("", "<tr><td>{}</td><td>{}</td></tr>", unable[:MAX_SHOWN])
        more = (
            f"and {len(unable) - MAX_SHOWN} more: manage.py placement_writer lists them all"
            if unable[MAX_SHOWN:]
            else ""
        )
        return format_html("<table>{}</table>{}", rows, more) if rows else "none"
