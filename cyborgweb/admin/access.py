"""Console pages of users, groups and API tokens. Also registers the pages that show data of several applications."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.auth.admin import GroupAdmin as StockGroupAdmin
from django.contrib.auth.admin import UserAdmin as StockUserAdmin
from django.contrib.auth.models import Group, Permission, User
from django.contrib.postgres.aggregates import StringAgg
from django.core.exceptions import ValidationError
from django.core.validators import EmailValidator
from django.db.models import Count, OuterRef, QuerySet, Subquery
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django_q.models import Failure, OrmQ, Schedule, Success
from unfold.decorators import display
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from accelerators.models import Host
from accelerators.ui import badges
from accelerators.ui.changelist import ConsoleModelAdmin
from accelerators.ui.empty_lists import Source
from accelerators.ui.explained_admin import Rights
from accelerators.ui.export import ExportedValue
from cyborgweb.admin.read_only import MaintenanceAdmin
from cyborgweb.auth import roles
from cyborgweb.auth.admin_audit import AuditedAdminMixin
from cyborgweb.models import ApiToken, Maintenance
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify.admin import DeliveryAdmin, SubscriptionAdmin
from cyborgweb.pages.host import HostPage
from cyborgweb.settings.mail_address import MailAddressError, parse_mail_address
from placement_sync.admin.writer import WriterAdmin
from placement_sync.models import Writer

if TYPE_CHECKING:
    UserAdminBase = StockUserAdmin[User]
else:  # at run time Django's class takes no type parameter
    UserAdminBase = StockUserAdmin

GROUP_NAMES = Subquery(
    Group.objects.filter(user=OuterRef("pk"))
    .order_by()
    .values("user")
    .annotate(names=StringAgg("name", ", ", order_by="name"))
    .values("names")
)
"""SQL expression for the names of a user's groups."""

for stock in (User, Group, Host):
    admin.site.unregister(stock)
for queue in (Failure, OrmQ, Schedule, Success):  # a person who can write these can make the workers run any function
    admin.site.unregister(queue)
admin.site.register(Host, HostPage)
admin.site.register(Writer, WriterAdmin)
admin.site.register(Subscription, SubscriptionAdmin)
admin.site.register(Delivery, DeliveryAdmin)
admin.site.register(Maintenance, MaintenanceAdmin)


class PlainAddressForm(UserChangeForm):
    """Form of a user. Accepts the same mail addresses as subscriptions do, and the stored one, whatever it is, so that
    a user who has another one can be changed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if field := self.fields.get("email"):  # the stored one may fail Django's check, too
            field.validators = [one for one in field.validators if not isinstance(one, EmailValidator)]

    def clean_email(self) -> str:
        """Return the mail address in its plain form, '' if there is none. Raises ValidationError if it is none that we
        accept. The stored address is not checked.
        """
        email = str(self.cleaned_data["email"])
        if email in ("", self.initial.get("email")):
            return email
        try:
            return parse_mail_address(email)
        except MailAddressError as error:
            raise ValidationError(str(error)) from None

    def _get_validation_exclusions(self) -> set[str]:
        """Return the fields that the model's checks leave out: also the address, which `clean_email` has checked."""
        exclusions: set[str] = super()._get_validation_exclusions()  # type: ignore[misc]  # the stubs lack it
        return exclusions | {"email"}


class ShortPermissionNames:
    """Mixin for a ModelAdmin whose form has permissions: it shows them without their application and model, which would
    not fit into the two lists."""

    def formfield_for_manytomany(self, db_field: Any, request: Any = None, **kwargs: Any) -> Any:
        """Build the form field; permissions are shown by their names, such as "Can change device"."""
        form_field: Any = super().formfield_for_manytomany(db_field, request, **kwargs)  # type: ignore[misc]
        if form_field and form_field.queryset.model is Permission:
            form_field.label_from_instance = lambda permission: permission.name
            form_field.queryset = form_field.queryset.order_by("name")
        return form_field


@admin.register(User)
class UserAdmin(ShortPermissionNames, AuditedAdminMixin, UserAdminBase, ConsoleModelAdmin):
    """List and form of the people who log in to the console and of the owners of API tokens. Changes become events."""

    kind = "user"
    form, add_form, change_password_form = PlainAddressForm, UserCreationForm, AdminPasswordChangeForm
    list_display = ("username", "email", "access", "shown_groups", "shown_login")
    list_filter = ("is_staff", "is_superuser", "is_active", "groups")
    search_help_text = "name, mail address"
    exports = {
        "access": ("is_active", "is_staff", "is_superuser"),
        "shown_groups": (ExportedValue("groups", (GROUP_NAMES,), lambda names: names),),
    }

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        """Return all users with their groups loaded."""
        users: QuerySet[User] = super().get_queryset(request).prefetch_related("groups")
        return users

    @display(description="Access")
    def access(self, user: User) -> SafeString:
        """Render a badge that says where a user may log in.

        The words are "off" (nowhere), "API only", "console", and "everything" for a superuser.
        """
        if not user.is_active:
            return badges.render_badge("off", "calm")
        if user.is_superuser:
            return badges.render_badge("everything", "good")
        return badges.render_badge("console", "good") if user.is_staff else badges.render_badge("API only", "calm")

    @display(description="Groups")
    def shown_groups(self, user: User) -> str:
        """Return the names of the user's groups, separated by commas; a dash if there are none."""
        return ", ".join(sorted(group.name for group in user.groups.all())) or badges.DASH

    @display(description="Last login", ordering="-last_login")
    def shown_login(self, user: User) -> SafeString:
        """Render when the user last logged in, relative to now; a dash if never."""
        return badges.render_relative_time(user.last_login)


@admin.register(Group)
class GroupAdmin(ShortPermissionNames, AuditedAdminMixin, StockGroupAdmin, ConsoleModelAdmin):
    """Groups of users that share permissions. Saving a group named after a role or project sets its permissions."""

    kind = "group"
    list_display = ("name", "shown_meaning", "shown_users")
    search_help_text = "name"
    empty = "No groups yet. The first start makes one for each role; one for a project is made by hand."
    sources = (Source("The manual: who sees and does what", manual="roles/#who-sees-and-does-what"),)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Group]:
        """Return all groups, each annotated with `number_of_users`."""
        groups: QuerySet[Group] = super().get_queryset(request).annotate(number_of_users=Count("user"))
        return groups

    @display(description="A member")
    def shown_meaning(self, group: Group) -> str:
        """Return what the members of the group see and do."""
        return roles.describe_group(group.name)

    @display(description="Users", ordering="number_of_users")
    def shown_users(self, group: Any) -> SafeString:
        """Render the number of the group's users as a link to their list. The group must come from `get_queryset`."""
        url = f"{reverse('admin:auth_user_changelist')}?{urlencode({'groups__id__exact': group.pk})}"
        return format_html('<a href="{}">{}</a>', url, group.number_of_users)

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Save the form's relations, then set the permissions of a group that is named after a role or project.

        For such a group this replaces the permissions that were chosen in the form.
        """
        super().save_related(request, form, formsets, change)
        roles.set_permissions(form.instance)


@admin.register(ApiToken)
class ApiTokenAdmin(AuditedAdminMixin, ConsoleModelAdmin):
    """List of tokens for `X-Auth-Token`. Only `manage.py api_token` makes tokens; deleting a token here revokes it."""

    kind = "token"
    list_display = ("name", "shown_user", "shown_roles", "project_id", "created")
    list_select_related = ("user",)
    search_fields = ("name__icontains", "user__username__icontains", "project_id__startswith")
    search_help_text = "name, user, project"
    fields = ("name", "shown_user", "shown_roles", "project_id", "created_at")
    readonly_fields = fields
    exports = {"shown_user": ("user__username",), "shown_roles": ("roles",)}
    empty = "No API tokens yet. This command makes one and prints it, once:"
    empty_command = "manage.py api_token NAME"
    rights: ClassVar[Rights] = {"add": None, "change": None}

    @display(description="User", ordering="user__username")
    def shown_user(self, token: ApiToken) -> SafeString:
        """Render the owner of the token as a link to the user's page."""
        url = reverse("admin:auth_user_change", args=[token.user_id])
        return format_html('<a href="{}">{}</a>', url, token.user.get_username())

    @display(description="Roles")
    def shown_roles(self, token: ApiToken) -> str:
        """Return the roles of the token, separated by commas."""
        return ", ".join(token.roles)

    @display(description="Made", ordering="-created_at")
    def created(self, token: ApiToken) -> SafeString:
        """Render when the token was made, relative to now."""
        return badges.render_relative_time(token.created_at)

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return all tokens, without loading their hashes, which no page shows."""
        return super().get_queryset(request).defer("token_hash")
