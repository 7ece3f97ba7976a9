{{/* Names, labels, images. Labels of Ray pods do not contain the chart's version, because a changed label would start a new Ray cluster. */}}

{{- define "hermes.fullname" -}}
{{ .Values.fullnameOverride | default (list .Release.Name .Values.nameOverride | compact | join "-") }}
{{- end }}

{{- define "hermes.selector" -}}
app.kubernetes.io/part-of: hermes-serve
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "hermes.labels" -}}
{{ include "hermes.selector" . }}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The metadata of an object: (dict "root" $ "name" "redis" "labels" dict "annotations" dict); `name` is appended to the full name,
     or `fullname` replaces it. Only `root` is needed. */}}
{{- define "hermes.metadata" -}}
metadata:
  name: {{ .fullname | default (list (include "hermes.fullname" .root) .name | compact | join "-") }}
  labels:
    {{- merge (include "hermes.labels" .root | fromYaml) (.labels | default dict) (.root.Values.commonLabels | default dict) | toYaml | nindent 4 }}
  {{- with merge (dict) (.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The labels of one component: (list $ "redis") */}}
{{- define "hermes.component" -}}
{{ include "hermes.selector" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* The name by which the service owns its namespace in Redis. */}}
{{- define "hermes.service" -}}
{{ .Values.settings.service | default (printf "%s/%s" .Release.Namespace .Release.Name) }}
{{- end }}

{{/* The port of a URL. */}}
{{- define "hermes.portOf" -}}
{{- $url := urlParse . -}}
{{ regexFind "[0-9]+$" $url.host | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end }}

{{/* An image reference: (list image defaultTag). A digest replaces the tag. */}}
{{- define "hermes.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (index . 1) }}
{{- end -}}
{{- end }}

{{- define "hermes.rayImage" -}}
{{ include "hermes.image" (list .Values.image .Chart.AppVersion) }}
{{- end }}

{{/* The Secret with the API keys. */}}
{{- define "hermes.keysSecret" -}}
{{ .Values.auth.existingSecret | default (print (include "hermes.fullname" .) "-keys") }}
{{- end }}

{{/* The account of ingresses, engines, Redis and `helm test`; with (list $ "head") the head's, which is the same if the chart makes none. */}}
{{- define "hermes.account" -}}
{{- $account := (index . 0).Values.serviceAccount -}}
{{- $name := $account.name | default (ternary (include "hermes.fullname" (index . 0)) "default" $account.create) -}}
{{ append (list $name) (ternary (index . 1) "" $account.create) | compact | join "-" }}
{{- end }}

{{/* How long ingresses and HAProxy must wait for streams, in seconds: the longest request plus a margin. */}}
{{- define "hermes.longestSeconds" -}}
{{ add (.Values.settings.ingress.max_request_timeout_s | ceil | int64) 100 }}
{{- end }}
